"""Checkpoints: what is saved comes back bit by bit; rotation; clear errors."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ajgrpo.errors import CheckpointError
from ajgrpo.training import checkpoint
from ajgrpo.training.checkpoint import RunProgress
from ajgrpo.training.sharding import make_mesh, replicated
from ajgrpo.training.step import TrainState


def make_state(seed: int = 0) -> TrainState:
    values = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    params = {"block": {"w": jnp.asarray(values)}, "final": {"scale": jnp.ones(3)}}
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params)
    return TrainState(params, state, jnp.int32(seed))


def write_nothing(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_a_state_comes_back_bit_by_bit(tmp_path: Path) -> None:
    state = make_state(seed=7)
    progress = RunProgress(global_step=7, num_tokens=123, next_prompt_index=9)
    path = checkpoint.save_checkpoint(tmp_path, progress, state, write_nothing)
    assert path == tmp_path / "checkpoint-7"
    assert checkpoint.load_progress(path) == progress
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda _: replicated(make_mesh({"fsdp": 2})), shapes)
    restored = checkpoint.load_train_state(path, shapes, shardings)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        checkpoint.save_checkpoint(tmp_path, RunProgress(step, run_id="a"), None, write_nothing, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-11"]
    assert checkpoint.find_checkpoint(True, tmp_path).name == "checkpoint-11"


def test_another_runs_checkpoints_stay(tmp_path: Path) -> None:
    """Whatever their steps: what this run has written last is never what goes."""
    for step in (20, 40):
        checkpoint.save_checkpoint(tmp_path, RunProgress(step, run_id="old"), None, write_nothing)
    for step in (5, 10, 15):
        path = checkpoint.save_checkpoint(tmp_path, RunProgress(step, run_id="new"), None, write_nothing, keep=1)
        assert path.is_dir()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "checkpoint-20",
        "checkpoint-40",
        "checkpoint-15",
    ]
    assert checkpoint.find_checkpoint(True, tmp_path).name == "checkpoint-15"


def test_another_runs_checkpoint_of_the_same_step_is_moved_aside(tmp_path: Path) -> None:
    for run_id in ("a", "b", "c", "c"):
        checkpoint.save_checkpoint(tmp_path, RunProgress(3, run_id=run_id), None, write_nothing)
    names = {path.name: checkpoint.load_progress(path).run_id for path in tmp_path.iterdir()}
    assert names == {"checkpoint-3.1": "a", "checkpoint-3.2": "b", "checkpoint-3": "c"}


def test_a_run_that_resumed_further_back_keeps_what_it_wrote_last(tmp_path: Path) -> None:
    for step in (40, 60, 45):
        checkpoint.save_checkpoint(tmp_path, RunProgress(step, run_id="a"), None, write_nothing, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-60", "checkpoint-45"]
    assert checkpoint.find_checkpoint(True, tmp_path).name == "checkpoint-45"


def test_a_checkpoint_that_names_no_run_is_another_runs(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, RunProgress(1), None, write_nothing)
    (path / "trainer_state.json").write_text('{"global_step": 1, "num_tokens": 5}')
    assert checkpoint.load_progress(path).num_tokens == 5
    checkpoint.save_checkpoint(tmp_path, RunProgress(2), None, write_nothing, keep=1)
    assert len(checkpoint.checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("text", ["[1]", "{", '{"global_step": "3", "num_tokens": 0}', '{"num_tokens": 0}'])
def test_a_damaged_trainer_state_is_named(tmp_path: Path, text: str) -> None:
    path = checkpoint.save_checkpoint(tmp_path, RunProgress(1), None, write_nothing)
    (path / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match="checkpoint-1 is not a training checkpoint"):
        checkpoint.load_progress(path)


def test_an_interrupted_save_is_no_checkpoint(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="checkpoint-3: disk full"):
        checkpoint.save_checkpoint(tmp_path, RunProgress(3), None, fail)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save_checkpoint(tmp_path, RunProgress(3), None, write_nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_errors_name_the_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint-N"):
        checkpoint.find_checkpoint(True, tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        checkpoint.find_checkpoint(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        checkpoint.load_progress(tmp_path)
    path = checkpoint.save_checkpoint(tmp_path, RunProgress(1), None, write_nothing)
    state = make_state()
    shapes = jax.eval_shape(lambda: state)
    with pytest.raises(CheckpointError, match="holds no train_state/"):
        checkpoint.load_train_state(path, shapes, shapes)


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, RunProgress(1), make_state(), write_nothing)
    other = TrainState({"block": {"w": jnp.zeros((5, 3))}}, optax.sgd(0.1).init({}), jnp.int32(0))
    shapes = jax.eval_shape(lambda: other)
    shardings = jax.tree.map(lambda _: replicated(make_mesh({"fsdp": 1})), shapes)
    with pytest.raises(CheckpointError, match="cannot be read into this run's model and optimizer"):
        checkpoint.load_train_state(path, shapes, shardings)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_train_state_is_named(tmp_path: Path, damage: str) -> None:
    state = make_state()
    path = checkpoint.save_checkpoint(tmp_path, RunProgress(1), state, write_nothing)
    for file in [file for file in (path / "train_state").rglob("*") if file.is_file()]:
        file.unlink() if damage == "removed" else file.write_bytes(file.read_bytes()[:20])
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda _: replicated(make_mesh({"fsdp": 2})), shapes)
    with pytest.raises(CheckpointError, match=r"checkpoint-1/train_state cannot be read .* missing or damaged"):
        checkpoint.load_train_state(path, shapes, shardings)
