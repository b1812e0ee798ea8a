"""The worker's process: what it sends, how it ends, and what its end tells."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ajgrpo.errors import PicklingError, RolloutWorkerError, WorkerDiedError, WorkerStalledError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.api import PacedRolloutWorker, RolloutWorker
from ajgrpo.rollout.loop import AsyncRolloutLoop
from ajgrpo.rollout.worker import (
    AsyncRolloutWorker,
    describe_exit,
    ensure_picklable,
    environment,
    pickle_spec,
    unpickle_spec,
)
from ajgrpo.types import GroupDone, RolloutSample
from tests.rollout.fakes import DEADLINE_S, make_spec, number_reward
from tests.rollout.server import tiny_server


@contextlib.contextmanager
def started(**overrides: Any) -> Iterator[AsyncRolloutWorker]:
    """A running worker; the default client, unless the test brings another."""
    worker = AsyncRolloutWorker(make_spec(**{"client_factory": None} | overrides))
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        assert multiprocessing.active_children() == []


def take(worker: AsyncRolloutWorker, num_groups: int) -> list[RolloutSample | GroupDone]:
    """Reads until ``num_groups`` groups are done."""
    items: list[RolloutSample | GroupDone] = []
    while sum(isinstance(item, GroupDone) for item in items) < num_groups:
        items.append(worker.rollout_queue.get(timeout=DEADLINE_S))
    return items


def health_error(worker: AsyncRolloutWorker, stale_after_s: float = 300.0) -> RolloutWorkerError:
    """Waits until ``check_health`` raises."""
    tick = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        try:
            worker.check_health(stale_after_s)
        except RolloutWorkerError as exc:
            return exc
        tick.wait(0.02)
    raise AssertionError("the worker stayed healthy")


# A healthy worker


def test_samples_metrics_and_counts_come_out_of_the_process() -> None:
    with tiny_server() as server, started(base_url=server.url) as worker:
        worker.update_model_version(3)
        items = take(worker, 4)
        samples = [item for item in items if isinstance(item, RolloutSample)]
        assert all(sample.versions.tolist() == [3, 3] for sample in samples)
        assert {sample.advantage > 0 for sample in samples} == {True, False}
        assert worker.generated_tokens == 16 and len(server.requests) == 8
        worker.check_health(stale_after_s=60.0)
        metrics = Metrics()
        metrics.merge(worker.metrics_queue.get(timeout=DEADLINE_S))
        assert metrics.reduce()["completions/mean_length"] == 2.0
        assert isinstance(worker, RolloutWorker) and isinstance(worker, PacedRolloutWorker)
    with pytest.raises(queue.Empty):
        worker.rollout_queue.get_nowait()
    with pytest.raises(RolloutWorkerError, match="not running"):
        worker.check_health(60.0)


def test_the_trainer_paces_the_worker_and_tells_it_the_version() -> None:
    with tiny_server() as server, started(base_url=server.url, token_allowance=1) as worker:
        worker.update_model_version(8)
        first = take(worker, 1)
        for expected in (2, 3, 4):  # one group at a time: the next starts once the last has been taken
            worker.note_taken(sum(item.num_tokens for item in first if isinstance(item, RolloutSample)))
            first = take(worker, 1)
            assert len(server.requests) == 2 * expected
            assert all(item.model_version == 8 for item in first if isinstance(item, RolloutSample))


def environment_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Nonzero exactly when the process is as it should be."""
    hidden = os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["JAX_PLATFORMS"] == "cpu"
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    without = not {"jax", "flax", "torch"} & set(sys.modules)
    return [float(hidden), float(deaf) + 2 * float(without) + 4]


def test_the_process_sees_no_accelerator_no_interrupt_and_no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with tiny_server() as server, started(base_url=server.url, reward_funcs=[environment_reward]) as worker:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3" and os.environ["JAX_PLATFORMS"] == "cuda"
        take(worker, 1)
        metrics = Metrics()
        while "rewards/environment_reward/mean" not in metrics.reduce():
            metrics.merge(worker.metrics_queue.get(timeout=DEADLINE_S))
        assert metrics.reduce()["rewards/environment_reward/mean"] == (1 + 1 + 2 + 4) / 2
        process = worker._process
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        take(worker, 3)


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "1")
    monkeypatch.delenv("UNSET_BEFORE", raising=False)
    with pytest.raises(KeyError), environment({"SET_BEFORE": "2", "UNSET_BEFORE": "3"}):
        assert (os.environ["SET_BEFORE"], os.environ["UNSET_BEFORE"]) == ("2", "3")
        raise KeyError
    assert os.environ["SET_BEFORE"] == "1" and "UNSET_BEFORE" not in os.environ


def test_start_and_stop_can_be_called_in_any_order() -> None:
    worker = AsyncRolloutWorker(make_spec(client_factory=None))
    worker.stop()
    worker.start()
    with pytest.raises(RolloutWorkerError, match="started already"):
        worker.start()
    worker.stop()
    worker.stop()
    assert multiprocessing.active_children() == []


# Ends


def failing_reward(**kwargs: Any) -> list[float]:
    raise ZeroDivisionError("of the reward")


def test_an_error_in_the_worker_arrives_with_its_traceback() -> None:
    with tiny_server() as server, started(base_url=server.url, reward_funcs=[failing_reward]) as worker:
        error = health_error(worker)
        assert isinstance(error, WorkerDiedError)
        text = str(error)
        assert "in failing_reward" in text and "ZeroDivisionError: of the reward" in text
        assert "RewardRaisedError: reward function 'failing_reward' raised" in text
        assert "ExceptionGroup" not in text
        assert str(health_error(worker)) == text


def test_a_worker_killed_from_outside_is_noticed() -> None:
    with tiny_server() as server, started(base_url=server.url) as worker:
        take(worker, 1)
        process = worker._process
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert "was ended by signal SIGKILL; the system may have run out of memory" in str(health_error(worker))


class ExitLoop(AsyncRolloutLoop):
    async def setup(self) -> None:
        sys.exit("no more")


class BlockedLoop(AsyncRolloutLoop):
    """Blocks the event loop, and with it the heartbeat, until the process is ended."""

    async def setup(self) -> None:
        threading.Event().wait()


def test_sys_exit_in_a_hook_is_an_error_like_any_other() -> None:
    with started(loop_cls=ExitLoop) as worker:
        assert "SystemExit: no more" in str(health_error(worker))


def test_a_worker_without_heartbeat_has_stalled_and_is_ended_by_force() -> None:
    worker = AsyncRolloutWorker(make_spec(client_factory=None, loop_cls=BlockedLoop))
    worker.start()
    process = worker._process
    try:
        error = health_error(worker, stale_after_s=0.5)
        assert isinstance(error, WorkerStalledError) and "rollout_worker_timeout=0.5" in str(error)
        assert process is not None and process.is_alive()
    finally:
        worker.stop(timeout_s=0.05)
    assert multiprocessing.active_children() == []


def endless_reward(**kwargs: Any) -> list[float]:
    threading.Event().wait()
    return []


def test_a_reward_function_that_never_returns_does_not_keep_the_process_alive() -> None:
    with tiny_server() as server, started(base_url=server.url, reward_funcs=[endless_reward]) as worker:
        tick = threading.Event()
        while worker.generated_tokens < 4:
            tick.wait(0.01)
            worker.check_health(DEADLINE_S)
        worker._state.stop_requested = 1
        assert worker._process is not None
        worker._process.join(DEADLINE_S)
        assert worker._process.exitcode == 0, "it ended by itself"


ORPHAN_SCRIPT = """
import os, sys, threading
from ajgrpo.rollout.worker import AsyncRolloutWorker
from tests.rollout.fakes import make_spec

if __name__ == "__main__":
    worker = AsyncRolloutWorker(make_spec(client_factory=None, token_allowance=0))
    worker.start()
    begin, tick = worker._state.heartbeat, threading.Event()
    while worker._state.heartbeat == begin:
        tick.wait(0.01)
    print(worker._process.pid, flush=True)
    sys.stdin.read()
    {end}
"""


@pytest.mark.parametrize("end", ["os._exit(3)", "sys.exit(4)", "os.kill(os.getpid(), 9)"])
def test_the_worker_ends_with_the_trainer(end: str, tmp_path: Any) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN_SCRIPT.format(end=end))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path) + os.pathsep + os.getcwd()},
        text=True,
    ) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        worker_pid = int(trainer.stdout.readline())
        trainer.stdin.close()
        trainer.wait(DEADLINE_S)
        assert gone(worker_pid)


def gone(pid: int) -> bool:
    """Whether a process that is not a child of this one ends within the deadline."""
    tick = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        tick.wait(0.02)
    return False


# Pickling


class Holder:
    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, **kwargs: Any) -> Any:
        return self.function(**kwargs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"reward_funcs": [number_reward, lambda **kwargs: [0.0]]}, r"reward_funcs\[1\] \(.*<lambda>\) cannot be sent"),
        ({"reward_funcs": [functools.partial(lambda **kwargs: [0.0])]}, r"reward_funcs\[0\] \(functools.partial"),
        ({"tools": [lambda: 1]}, r"tools\[0\] \(.*<lambda>\)"),
        ({"reward_funcs": [Holder(lambda: 1)]}, r"reward_funcs\[0\] .*Holder"),
        ({"dataset": threading.Lock()}, r"dataset .*lock"),
    ],
)
def test_what_cannot_be_pickled_is_named_before_anything_starts(overrides: dict[str, Any], message: str) -> None:
    worker = AsyncRolloutWorker(make_spec(**{"client_factory": None} | overrides))
    with pytest.raises(PicklingError, match=message) as caught:
        worker.start()
    assert isinstance(caught.value, TypeError) and "use a module-level function" in str(caught.value)
    assert multiprocessing.active_children() == []


def test_a_class_defined_in_a_function_is_named() -> None:
    class Local(AsyncRolloutLoop):
        pass

    with pytest.raises(PicklingError, match=r"loop_cls \(.*Local\) cannot be sent"):
        AsyncRolloutWorker(make_spec(client_factory=None, loop_cls=Local)).start()


def test_picklable_functions_pass() -> None:
    for function in (number_reward, functools.partial(number_reward), Holder(number_reward)):
        assert ensure_picklable("reward_funcs[0]", function)


def test_what_the_worker_cannot_import_is_named() -> None:
    missing = b"cno_such_module\nreward\n."
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught:
        unpickle_spec(pickle.dumps({"reward_funcs": missing}))
    assert caught.value.__notes__ == [
        "while the rollout worker's process loaded reward_funcs; it must be importable there"
    ]


def test_spec_survives_the_way() -> None:
    spec = make_spec(client_factory=None, dataset=[1, 2], tokenizer=None)
    assert unpickle_spec(pickle_spec(spec)) == spec


def test_exit_codes_are_explained() -> None:
    assert describe_exit(-signal.SIGSEGV, begun=True) == "was ended by signal SIGSEGV"
    assert '`if __name__ == "__main__":`' in describe_exit(1, begun=False)
    assert "exit code 0 in the middle of its work" in describe_exit(0, begun=True)


def leaving_reward(**kwargs: Any) -> list[float]:
    os._exit(0)


def test_a_reward_function_that_ends_the_process_is_not_blamed_on_the_script() -> None:
    with tiny_server() as server, started(base_url=server.url, reward_funcs=[leaving_reward]) as worker:
        text = str(health_error(worker))
        assert "exit code 0 in the middle of its work" in text and "os._exit" in text and "__main__" not in text


UNGUARDED = """
from ajgrpo.rollout.worker import AsyncRolloutWorker, refuse_in_worker
from tests.rollout.fakes import make_spec
refuse_in_worker()
worker = AsyncRolloutWorker(make_spec(client_factory=None))
worker.start()
worker._process.join(60)
try:
    worker.check_health(60.0)
finally:
    worker.stop()
"""


def test_a_script_without_main_guard_is_told_so(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    # From the worker's process, at once; and from the trainer's when it looks.
    assert "ConfigError: the rollout worker's process imports the main script" in done.stderr
    assert "before its own code began" in done.stderr


FORBIDDEN = ("jax", "flax", "torch")
IMPORTS = """
import importlib, pkgutil, sys
import ajgrpo.rollout
for module in pkgutil.iter_modules(ajgrpo.rollout.__path__, "ajgrpo.rollout."):
    importlib.import_module(module.name)
import ajgrpo.rewards
print([name for name in {forbidden} if name in sys.modules])
"""


def test_importing_the_rollout_part_leaves_jax_out() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(forbidden=FORBIDDEN)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.strip() == "[]"
