import io
import json
import math
import sys
import types

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ajgrpo import loggers
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError
from ajgrpo.loggers import ConsoleProgress, MetricsFile, Reporters, TensorBoardReporter, build_reporters, read_metrics


class FakeTracker(types.ModuleType):
    """Stands in for the packages wandb and trackio: records what they are told."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, metrics, step):
        self.calls.append(("log", step, metrics))

    def finish(self):
        self.calls.append(("finish",))


def write_windows(path, steps, resumed_step=0):
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.log(step, {"loss": step / 10})
    file.close()


def steps_of(path):
    return [record["step"] for record in read_metrics(path)]


def test_metrics_file_holds_one_line_per_window_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(1, {"loss": 0.5, "reward": math.nan, "grad_norm": math.inf})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "reward": None, "grad_norm": None}
    file.log(2, {"loss": 0.25})
    assert path.read_text().count("\n") == 2
    file.close()


def test_a_resumed_run_appends_after_the_step_that_it_resumes_from(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_windows(path, [1, 2, 3, 4])
    write_windows(path, [3, 4, 5], resumed_step=2)
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_windows(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps_of(path) == [1, 2]
    write_windows(path, [4], resumed_step=3)
    assert steps_of(path) == [1, 2, 4]


def test_a_new_run_moves_the_file_of_an_earlier_run_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ([1], [1, 2], [1, 2, 3]):
        write_windows(path, steps)
    assert steps_of(path) == [1, 2, 3]
    assert steps_of(tmp_path / "metrics.1.jsonl") == [1]
    assert steps_of(tmp_path / "metrics.2.jsonl") == [1, 2]


def test_tensorboard_reads_the_scalars(tmp_path):
    reporter = TensorBoardReporter(AsyncGRPOConfig(), tmp_path)
    for step in (1, 2, 3):
        reporter.log(step, {"reward": step / 4, "perf/step_s": 2.0})
    reporter.close()
    resumed = TensorBoardReporter(AsyncGRPOConfig(), tmp_path, resumed_step=2)
    resumed.log(3, {"reward": 8.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["perf/step_s", "reward"]
    # Step 3 of the first run was trained again.
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 8.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_config_metrics_and_the_end_but_no_secret(name, tmp_path, monkeypatch):
    tracker = FakeTracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    config = AsyncGRPOConfig(report_to=[name], run_name="first", hub_token="secret", disable_tqdm=True)
    reporters = build_reporters(config, tmp_path)
    reporters.log(3, {"loss": 0.5})
    reporters.close()
    (_, options), *rest = tracker.calls
    assert (options["project"], options["name"], options["config"]["learning_rate"]) == ("ajgrpo", "first", 1e-6)
    assert "secret" not in repr(tracker.calls)
    assert rest == [("log", 3, {"loss": 0.5}), ("finish",)]
    assert steps_of(tmp_path / "metrics.jsonl") == [3]


def test_a_missing_tracker_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    monkeypatch.setattr(loggers.importlib, "import_module", missing_module)
    with pytest.raises(ConfigError, match=r"pip install 'ajgrpo\[wandb\]'"):
        build_reporters(AsyncGRPOConfig(report_to=["wandb"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def missing_module(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_an_import_that_fails_inside_a_tracker_is_not_hidden(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'protobuf'", name="protobuf")

    monkeypatch.setattr(loggers.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="protobuf"):
        loggers.require_tracker("wandb")


def test_the_console_prints_one_line_per_window_when_it_is_no_terminal():
    stream = io.StringIO()
    progress = ConsoleProgress(AsyncGRPOConfig(max_steps=20), stream)
    progress.log(3, {"reward": 0.4123, "loss": 0.0123456, "perf/wall_clock_forwarded_tokens_per_s": 913.2, "x": 1.0})
    progress.log(4, {"loss": 0.5})
    progress.close()
    assert stream.getvalue() == "step 3/20  reward 0.4123  loss 0.01235  tokens/s 913.2\nstep 4/20  loss 0.5\n"


def test_without_max_steps_the_console_counts_epochs():
    stream = io.StringIO()
    ConsoleProgress(AsyncGRPOConfig(num_train_epochs=3), stream).log(7, {"epoch": 0.5, "reward": 1.0})
    assert stream.getvalue() == "step 7  epoch 0.50/3  reward 1\n"


def test_on_a_terminal_there_is_one_bar(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(loggers, "Console", lambda file: Console(file=file, force_terminal=True, width=100))
    progress = ConsoleProgress(AsyncGRPOConfig(max_steps=4), stream)
    for step in (1, 2, 4):
        progress.log(step, {"reward": step / 4})
    (task,) = progress._progress.tasks
    assert (task.completed, task.total, task.description) == (4, 4.0, "step 4/4  reward 1")
    progress.close()
    assert "step 4/4  reward 1" in stream.getvalue()


def test_disable_tqdm_keeps_the_console_quiet(tmp_path, capsys):
    for disable, kinds in ((True, [MetricsFile]), (False, [MetricsFile, ConsoleProgress])):
        reporters = build_reporters(AsyncGRPOConfig(disable_tqdm=disable), tmp_path)
        assert [type(reporter) for reporter in reporters.reporters] == kinds
        reporters.log(1, {"loss": 1.0})
        reporters.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 1  loss 1\n")


def test_every_reporter_is_closed_although_one_fails():
    class Failing:
        def log(self, step, metrics):
            pass

        def close(self):
            raise OSError("disk full")

    first, last = FakeTracker("a"), FakeTracker("b")
    first.close, last.close = first.finish, last.finish
    with pytest.raises(OSError, match="disk full"):
        Reporters([first, Failing(), last]).close()
    assert first.calls == last.calls == [("finish",)]
