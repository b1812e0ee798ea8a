"""The command itself, with a trainer that stands in for the real one."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from ajgrpo import train
from ajgrpo.errors import WeightTransferError

ROW = {"prompt": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}


def my_reward(completions, **kwargs):
    return [1.0 for _ in completions]


@dataclasses.dataclass
class Result:
    checkpoint_dir: pathlib.Path
    metrics_path: pathlib.Path
    global_step: int


class StandIn:
    """Writes what a trainer writes."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def train(self, resume_from_checkpoint):
        args = self.arguments["args"]
        output = pathlib.Path(args.output_dir)
        output.mkdir(exist_ok=True)
        lines = [json.dumps({"step": step, "reward": step / args.max_steps}) for step in range(args.max_steps)]
        (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (output / "resumed").write_text(str(resume_from_checkpoint))
        return Result(output / "checkpoint-4", output / "metrics.jsonl", args.max_steps)


class Failing(StandIn):
    def train(self, resume_from_checkpoint):
        raise WeightTransferError("pause", "no answer; restart the server")


class Interrupted(StandIn):
    def train(self, resume_from_checkpoint):
        raise KeyboardInterrupt


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps(ROW) + "\n")
    options = {
        "model": "m", "dataset": tmp_path / "d.jsonl", "reward_funcs": "tests.test_train.my_reward", "max_steps": 4,
        "output_dir": tmp_path / "out",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items()]


def test_a_run_says_where_its_results_lie(arguments, tmp_path, capsys):
    assert train.main([*arguments, "--trainer", "tests.test_train.StandIn", "--resume_from_checkpoint"]) == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out == (
        "trained 4 steps\n"
        f"checkpoint: {out / 'checkpoint-4'}\n"
        f"metrics:    {out / 'metrics.jsonl'}\n"
        f"picture:    {out / 'reward_curve.png'}\n"
    )
    assert (out / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "resumed").read_text() == "True"


def test_a_failure_is_its_message_and_status_1(arguments, capsys):
    assert train.main([*arguments, "--trainer", "tests.test_train.Failing"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: weight transfer failed in phase 'pause': no answer; restart the server\n"
    assert train.main([*arguments, "--trainer", "tests.test_train.Failing", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_status_130(arguments, capsys):
    assert train.main([*arguments, "--trainer", "tests.test_train.Interrupted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_wrong_configuration_is_status_2_with_all_errors(capsys):
    assert train.main(["--sed", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[:2] == [
        "error: 4 configuration errors:",
        "  - unknown option --sed; did you mean 'seed'?",
    ]


def test_print_config(arguments, capsys):
    assert train.main([*arguments, "--print_config"]) == 0
    assert "max_steps: 4\n" in capsys.readouterr().out


def test_modules_in_the_working_directory_are_found_also_by_a_spawned_process(tmp_path):
    """The rollout worker unpickles functions by their module's name."""
    (tmp_path / "my_module.py").write_text(
        "import multiprocessing, pathlib\n"
        "def my_reward(completions, **kwargs): return []\n"
        "def child(path, function): pathlib.Path(path).write_text(function.__module__)\n"
        "class Trainer:\n"
        "    def __init__(self, reward_funcs, **arguments): self.function = reward_funcs[0]\n"
        "    def train(self, resume_from_checkpoint):\n"
        "        context = multiprocessing.get_context('spawn')\n"
        "        process = context.Process(target=child, args=('seen.txt', self.function))\n"
        "        process.start()\n"
        "        process.join(60)\n"
        "        raise KeyboardInterrupt\n"
    )
    (tmp_path / "d.jsonl").write_text(json.dumps(ROW) + "\n")
    root = pathlib.Path(__file__).parents[1]
    # A script outside the working directory, so that Python does not put the directory on the path by itself.
    script = tmp_path / "elsewhere" / "run.py"
    script.parent.mkdir()
    script.write_text("import sys\nfrom ajgrpo import train\nif __name__ == '__main__': sys.exit(train.main())\n")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    options = ["--model=m", "--dataset=d.jsonl", "--reward_funcs=my_module.my_reward", "--trainer=my_module.Trainer"]
    ended = subprocess.run(
        [sys.executable, str(script), *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
    assert (tmp_path / "seen.txt").read_text() == "my_module"
