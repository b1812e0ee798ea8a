"""The README's first command learns, by the check that a run in the wrong direction fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajgrpo.loggers import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1500)  # the run takes three minutes on two idle cores


def train(output_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ajgrpo.train", "--config", "configs/quickstart.yaml"]
    command += ["--output_dir", str(output_dir), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def check(output_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_learning.py", str(output_dir / "metrics.jsonl")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_quickstart_learns_and_says_where_everything_lies(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert run.returncode == 0, run.stderr
    for name in ("checkpoint-180/model.safetensors", "metrics.jsonl", "reward_curve.png"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name.split("/")[0]) in run.stdout
    checked = check(tmp_path)
    assert checked.returncode == 0, checked.stdout
    lines = read_metrics(tmp_path / METRICS_FILE)
    differences = [line.get("sampling/on_policy_logp_difference/max") for line in lines]
    measured = [value for value in differences if value is not None]
    assert len(measured) >= 18  # how often depends on the machine's load
    assert max(measured) < 1e-4  # float32 on both sides
    assert sum(line.get("perf/compile_count", 0) for line in lines) == 5  # one for each bucket


def test_a_run_in_the_wrong_direction_fails_the_check(tmp_path: Path) -> None:
    run = train(tmp_path, "--loss", "tests.flipped.loss", "--max_steps", "8", "--save_strategy", "no")
    assert run.returncode == 0, run.stderr
    checked = check(tmp_path)
    assert checked.returncode == 1
    assert "FAILED" in checked.stdout
    lines = read_metrics(tmp_path / METRICS_FILE)
    assert lines[-1]["reward"] < lines[0]["reward"] - 0.1
