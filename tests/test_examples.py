"""The scripts of ``examples/``, end to end for a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_a_tool_conversation_trains_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward exists only in the environment, so a reward above 0 means that calls were read, run and scored."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import graded_addition

    options: dict[str, Any] = {"token_budget": 256, "num_generations": 4, "vllm_server_timeout": 120.0}
    trainer = graded_addition.make_trainer(max_steps=3, output_dir=str(tmp_path), disable_tqdm=True, **options)
    assert trainer.train().global_step == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["rewards/Grader/mean"] for line in lines if "rewards/Grader/mean" in line) > 0
    assert sum(line.get("tools/submit/call_count", 0) for line in lines) > 0
    assert max(line.get("rollout/turns_max", 0) for line in lines) == 2
    # A model may sample text that renders differently (two numbers in one message); nearly all of it does not.
    assert all(line["rollout/fork_frac"] < 0.2 for line in lines if "rollout/fork_frac" in line)
    on_policy = [
        line["sampling/on_policy_logp_difference/max"]
        for line in lines
        if "sampling/on_policy_logp_difference/max" in line
    ]
    assert all(value < 1e-4 for value in on_policy), "the trainer sees the tokens that the server saw"


def test_tools_and_environments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    from ajgrpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from ajgrpo.errors import ConfigError
    from ajgrpo.parts import model_source
    from tests.rollout.agents import AsyncGame, Counter

    model = model_source("builtin:tiny-arithmetic")
    args = AsyncGRPOConfig(output_dir=str(tmp_path), vllm_server_base_url="embedded")
    with pytest.raises(ConfigError, match="max_steps must be set without a dataset"):
        AsyncGRPOTrainer(model, args=args, environment_factory=AsyncGame)
    with pytest.raises(ConfigError, match="column 'environment'"):
        AsyncGRPOTrainer(model, args=args, environment_factory={"a": Counter})
