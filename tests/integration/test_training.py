"""The whole product at work: server process, worker process, trainer, weight pushes, checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from datasets import Dataset

from ajgrpo import loggers
from ajgrpo.arithmetic import arithmetic_rows, make_dataset
from ajgrpo.callbacks import TrainerCallback
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import (
    AjgrpoError,
    CheckpointError,
    ConfigError,
    DatasetError,
    PicklingError,
    ServerError,
    ServerTimeoutError,
    TrainingDivergedError,
    UnsupportedModelError,
)
from ajgrpo.hf import io
from ajgrpo.parts import model_source
from ajgrpo.rewards import exact_match_reward
from ajgrpo.trainer import AsyncGRPOTrainer
from tests.conftest import marked_processes
from tests.integration.rewards import turns_into_text

MODEL = model_source("builtin:tiny-arithmetic")
OPTIONS: dict[str, Any] = {
    "vllm_server_base_url": "embedded",
    "embedded_max_model_len": 64,
    "embedded_max_num_seqs": 32,
    "bf16": False,
    "mesh": {"data": 1, "fsdp": 1},
    "num_generations": 4,
    "max_completion_length": 8,
    "max_concurrent_rollouts": 32,
    "token_budget": 256,
    "learning_rate": 3e-4,
    "disable_tqdm": True,
    "vllm_server_timeout": 120.0,
}


def make_trainer(output_dir: Path, **changes: Any) -> AsyncGRPOTrainer:
    parts = {"reward_funcs": exact_match_reward, "train_dataset": make_dataset(64, max_operand=49), "callbacks": None}
    chosen = {name: changes.pop(name, value) for name, value in parts.items()}
    args = AsyncGRPOConfig(**{**OPTIONS, "output_dir": str(output_dir), **changes})
    return AsyncGRPOTrainer(MODEL, args=args, **chosen)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    return loggers.read_metrics(output_dir / loggers.METRICS_FILE)


class SaveAt(TrainerCallback):
    """Asks for a checkpoint after one step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that also saved after the fourth."""
    output_dir = tmp_path_factory.mktemp("run")
    result = make_trainer(output_dir, max_steps=8, callbacks=[SaveAt(4)]).train()
    assert result.global_step == 8
    assert result.checkpoint_dir == output_dir / "checkpoint-8"
    return output_dir


def test_server_and_trainer_agree_while_generation_goes_on(finished: Path) -> None:
    """In-flight requests included: they go on under the new weights after a push."""
    values = [line.get("sampling/on_policy_logp_difference/max") for line in read_metrics(finished)]
    measured = [value for value in values if value is not None]  # a step may train older tokens only
    assert measured and max(measured) < 1e-4


def test_server_and_trainer_agree_after_every_push(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=4, max_staleness=0, save_strategy="no").train()
    values = [line["sampling/on_policy_logp_difference/max"] for line in read_metrics(tmp_path)]
    assert len(values) == 4
    assert max(values) < 1e-4


def test_programs_are_compiled_once(finished: Path) -> None:
    from ajgrpo.packing.batch import bucket_sizes

    counts = [line.get("perf/compile_count", 0) for line in read_metrics(finished)]
    assert sum(counts) == len(bucket_sizes(256))


def test_generation_goes_on_during_the_train_step(finished: Path) -> None:
    lines = read_metrics(finished)
    assert sum(line["perf/fwd_bwd_generated_tokens_count"] for line in lines) > 0
    assert all(line["perf/rollout_wait_s"] >= 0 for line in lines)


def test_the_checkpoint_differs_from_the_start_and_loads(finished: Path) -> None:
    _, config = io.read_config(finished / "checkpoint-8")
    trained = io.load_params(finished / "checkpoint-8", config, dtype="float32")
    before = io.load_params(MODEL, config, dtype="float32")
    moved = [float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (trained, before)), strict=True)]
    assert max(moved) > 1e-4
    assert json.loads((finished / "checkpoint-8" / "rollout_state.json").read_text())["next_prompt_index"] > 0


def test_a_run_resumes_where_it_was_saved(finished: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=6)
    result = trainer.train(resume_from_checkpoint=str(finished / "checkpoint-4"))
    assert result.global_step == 6
    assert [line["step"] for line in read_metrics(tmp_path)] == [5, 6]


def test_epochs_end_the_run(tmp_path: Path) -> None:
    dataset = make_dataset(12, max_operand=49)
    result = make_trainer(tmp_path, num_train_epochs=1.0, train_dataset=dataset, save_strategy="no").train()
    assert result.metrics["epoch"] == 1.0
    assert result.checkpoint_dir is None


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        make_trainer(tmp_path, train_dataset=None)
    with pytest.raises(DatasetError):
        make_trainer(tmp_path, train_dataset=make_dataset(4).select([]))
    with pytest.raises(PicklingError, match="lambda"):
        make_trainer(tmp_path, reward_funcs=lambda **kwargs: [0.0], max_steps=1).train()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        make_trainer(blocked / "below", max_steps=1).train()
    with pytest.raises(ServerTimeoutError, match="no server answers"):
        changes = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.5}
        make_trainer(tmp_path, max_steps=1, **changes).train()


def test_models_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    def trainer(model: Path) -> AsyncGRPOTrainer:
        return AsyncGRPOTrainer(str(model), exact_match_reward, train_dataset=make_dataset(4), args=AsyncGRPOConfig())

    with pytest.raises(CheckpointError, match=str(tmp_path / "absent")):
        trainer(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        trainer(tmp_path)
    shutil.copytree(MODEL, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=str(tmp_path / "cut")):
        trainer(tmp_path / "cut")


def test_a_reward_that_turns_bad_ends_the_run_by_name_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=10000, reward_funcs=turns_into_text)
    with pytest.raises(AjgrpoError, match=r"(?s)turns_into_text.*'0\.5'"):
        trainer.train()
    trained = read_metrics(tmp_path)[-1]["step"]
    assert trained >= 1
    assert (tmp_path / f"checkpoint-{trained}" / "model.safetensors").exists()


def test_prompts_longer_than_the_server_takes_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = arithmetic_rows(16, max_operand=49)
    for row in rows[::2]:
        row["prompt"][0]["content"] = "1+" * 64
    dataset = Dataset.from_list(rows)
    result = make_trainer(tmp_path, num_train_epochs=1.0, train_dataset=dataset, save_strategy="no").train()
    assert result.metrics["epoch"] == 1.0
    assert sum(line.get("rollout/prompt_too_long_count", 0) for line in read_metrics(tmp_path)) == 8


def test_a_server_that_dies_ends_the_run_with_its_log_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    class KillServer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                (server,) = [pid for pid, command in marked_processes().items() if "ajgrpo.serve" in command]
                os.kill(server, signal.SIGKILL)

    trainer = make_trainer(tmp_path, max_steps=10000, callbacks=[KillServer()])
    with pytest.raises(AjgrpoError) as caught:
        trainer.train()
    # Whether the worker's request, the push or the wait for samples meets the corpse first.
    assert isinstance(caught.value, ServerError) and "the embedded server has ended" in str(caught.value)
    assert read_metrics(tmp_path)[-1]["step"] >= 2
    steps = [int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")]
    assert len(steps) == 1 and steps[0] >= 2


class Raise(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("a callback's mistake")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("another one")


def test_a_callbacks_exception_loses_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, gradient_accumulation_steps=2, callbacks=[Raise()], logging_steps=5)
    with pytest.raises(KeyError, match="a callback's mistake") as caught:
        trainer.train()
    assert caught.value.__notes__ == ["besides, step 2 could not be saved: RuntimeError: another one"]
    assert (tmp_path / "checkpoint-2" / "train_state").is_dir()  # written before on_save was called
    (window,) = read_metrics(tmp_path)
    assert window["step"] == 2
    assert window["batch/microbatches_per_step"] == 2


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=50, loss="tests.integration.losses.careless_loss")
    with pytest.raises(TrainingDivergedError, match=r"loss 'tests\.integration\.losses\.careless_loss' was nan"):
        trainer.train()


def test_a_run_with_nothing_left_to_do_says_so(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ajgrpo"):
        result = make_trainer(finished, max_steps=8).train(resume_from_checkpoint=True)
    assert result.global_step == 8
    assert any("no step was trained: the run began at step 8 of max_steps=8" in text for text in caplog.messages)


def test_a_checkpoint_of_the_output_directory_is_no_model_for_it(finished: Path) -> None:
    args = AsyncGRPOConfig(**{**OPTIONS, "output_dir": str(finished)})
    trainer = AsyncGRPOTrainer(finished / "checkpoint-8", exact_match_reward, args, make_dataset(8, max_operand=49))
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        trainer.train()


def test_ctrl_c_saves_and_stops_everything(tmp_path: Path) -> None:
    config = {**OPTIONS, "model": "builtin:tiny-arithmetic", "dataset": "ajgrpo.arithmetic.make_dataset"}
    config.update(reward_funcs="exact_match_reward", max_steps=100000, output_dir=str(tmp_path / "out"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**config, "disable_tqdm": False}))
    command = [sys.executable, "-m", "ajgrpo.train", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    steps = [int(path.name.split("-")[1]) for path in (tmp_path / "out").glob("checkpoint-*")]
    assert steps and steps[0] >= 2
