"""The rollout loop in a process of its own.

    trainer's process                                    worker's process (spawned; no GPU, no signals)
    AsyncRolloutWorker ── pickled spec (pipe) ─────────▶ _child_main: AsyncRolloutLoop.run()
      rollout_queue ◀┐                                      │ publish, report
      metrics_queue ◀┼── receive thread ◀── pipe ◀── send thread
      traceback     ◀┘
    WorkerState (shared memory, one writer per number) ◀──▶ control task

Queues of ``multiprocessing`` are not used: a worker killed while it writes would leave half a message in them, and
the trainer's next ``get`` would wait for the other half for ever. Here the trainer reads ordinary ``queue.Queue``s, and
the end of the pipe ends the receive thread.

The worker ends when it is told to stop, when its loop raises, or when the trainer's process is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ajgrpo.errors import ConfigError, PicklingError, RolloutWorkerError, WorkerDiedError, WorkerStalledError
from ajgrpo.metrics import Observation
from ajgrpo.rollout.api import WorkerSpec
from ajgrpo.types import GroupDone, RolloutSample

__all__ = ["AsyncRolloutWorker", "WorkerSpec", "ensure_picklable"]

CHILD_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
"""Set for the worker's process: reward functions and tools must not take the trainer's accelerators."""

PROCESS_NAME = "ajgrpo-rollout-worker"

STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 3.0
"""How long to wait after asking the worker to stop, and then after SIGKILL."""

FLUSH_TIMEOUT_S = 5.0
"""How long a worker that ends waits for its last records to be read."""

_ITEM, _METRICS, _ERROR = "item", "metrics", "error"


class SharedState(ctypes.Structure):
    """``WorkerState`` in shared memory. Aligned numbers of 8 bytes are read and written in one piece."""

    model_version: int
    token_allowance: int
    taken_tokens: int
    stop_requested: int
    generated_tokens: int
    begun: int
    heartbeat: float
    _fields_ = [
        ("model_version", ctypes.c_int64),
        ("token_allowance", ctypes.c_int64),
        ("taken_tokens", ctypes.c_int64),
        ("stop_requested", ctypes.c_int64),
        ("generated_tokens", ctypes.c_int64),
        ("begun", ctypes.c_int64),
        ("heartbeat", ctypes.c_double),
    ]


class AsyncRolloutWorker:
    """Runs ``spec.loop_cls`` in a spawned process (a ``PacedRolloutWorker``).

    Attributes:
        rollout_queue: ``RolloutSample`` and ``GroupDone`` records: all samples of a group, then its ``GroupDone``.
        metrics_queue: lists of ``Observation``.
    """

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self.rollout_queue: queue.Queue[RolloutSample | GroupDone] = queue.Queue()
        self.metrics_queue: queue.Queue[list[Observation]] = queue.Queue()
        self._context = multiprocessing.get_context("spawn")
        self._state: SharedState = self._context.RawValue(SharedState)
        self._state.token_allowance = spec.token_allowance
        self._process: SpawnProcess | None = None
        self._receiver: threading.Thread | None = None
        self._traceback: str | None = None

    def start(self) -> None:
        """Starts the process and returns at once.

        Raises:
            PicklingError: something in the spec cannot be sent to another process.
            RolloutWorkerError: it runs already.
        """
        if self._process is not None:
            raise RolloutWorkerError("the rollout worker has been started already")
        payload = pickle_spec(self._spec)
        inbox, outbox = self._context.Pipe(duplex=False)
        spec_inbox, spec_outbox = self._context.Pipe(duplex=False)
        self._state.heartbeat = time.monotonic()
        process = self._context.Process(target=_child_main, args=(spec_inbox, self._state, outbox), name=PROCESS_NAME)
        with environment(CHILD_ENVIRONMENT):
            process.start()
        # With the worker's ends closed here, its death breaks both pipes.
        spec_inbox.close()
        outbox.close()
        self._process = process
        self._receiver = threading.Thread(
            target=self._receive, args=(spec_outbox, payload, inbox), name="rollout-receiver", daemon=True
        )
        self._receiver.start()
        atexit.register(self.stop)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the process: asks it, and after ``timeout_s`` forces it. May be called again, or without ``start``."""
        process, self._process = self._process, None
        if process is None:
            return
        self._state.stop_requested = 1
        try:
            process.join(timeout_s)
        finally:  # also when the wait is interrupted
            if process.is_alive():
                process.kill()
                process.join(KILL_TIMEOUT_S)
        assert self._receiver is not None
        self._receiver.join(KILL_TIMEOUT_S)
        process.close()
        atexit.unregister(self.stop)

    def update_model_version(self, version: int) -> None:
        """Tells which policy version the server now runs."""
        self._state.model_version = version

    def set_token_allowance(self, tokens: int) -> None:
        """Bound on the tokens (``RolloutSample.num_tokens``) that may be queued or in flight."""
        self._state.token_allowance = tokens

    def note_taken(self, tokens: int) -> None:
        """A sample of ``tokens`` tokens has left ``rollout_queue``. Only one thread may call this."""
        self._state.taken_tokens += tokens

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens of all finished rollouts so far."""
        return self._state.generated_tokens

    def check_health(self, stale_after_s: float) -> None:
        """Raises when no more rollouts can be expected.

        Raises:
            WorkerDiedError: the process ended; with its own traceback where it left one.
            WorkerStalledError: no heartbeat for ``stale_after_s`` seconds.
            RolloutWorkerError: it was never started, or has been stopped.
        """
        if self._process is None or self._receiver is None:
            raise RolloutWorkerError("the rollout worker is not running")
        if not self._process.is_alive():
            self._receiver.join(FLUSH_TIMEOUT_S)  # its traceback may still be in the pipe
        if self._traceback is not None:
            raise WorkerDiedError(f"the rollout worker failed:\n{self._traceback}")
        if self._process.exitcode is not None:
            how = describe_exit(self._process.exitcode, begun=bool(self._state.begun))
            raise WorkerDiedError(f"the rollout worker {how}")
        silent = time.monotonic() - self._state.heartbeat
        if silent > stale_after_s:
            raise WorkerStalledError(
                f"the rollout worker gave no heartbeat for {silent:.0f} s (rollout_worker_timeout={stale_after_s:g}); "
                "something blocks its event loop, for example a hook that computes or waits without `await`"
            )

    def _receive(self, spec_outbox: Connection, payload: bytes, inbox: Connection) -> None:
        """Sends the spec, then sorts what comes back until the worker is gone."""
        with spec_outbox, inbox, contextlib.suppress(EOFError, OSError):
            spec_outbox.send_bytes(payload)
            while True:
                kind, content = inbox.recv()
                if kind == _ITEM:
                    self.rollout_queue.put(content)
                elif kind == _METRICS:
                    self.metrics_queue.put(content)
                else:
                    self._traceback = content


def ensure_picklable(name: str, obj: Any) -> bytes:
    """The pickled object.

    Args:
        name: what it is, for the message, for example ``"reward_funcs[0]"``.
        obj: the object.

    Raises:
        PicklingError: it cannot be pickled; says what to use instead.
    """
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as exc:
        label = getattr(obj, "__qualname__", None) or repr(obj)[:200]
        raise PicklingError(
            f"{name} ({label}) cannot be sent to the rollout worker's process: {exc}. Lambdas, functions defined "
            "inside functions and objects that hold them cannot be pickled; use a module-level function, a "
            "functools.partial of one, or an instance of a module-level class"
        ) from exc


def pickle_spec(spec: WorkerSpec) -> bytes:
    """The spec, pickled field by field so that a message can name what cannot be sent.

    Raises:
        PicklingError: see ``ensure_picklable``.
    """
    for field in ("reward_funcs", "tools"):
        for index, function in enumerate(getattr(spec, field)):
            ensure_picklable(f"{field}[{index}]", function)
    names = [field.name for field in dataclasses.fields(spec)]
    return pickle.dumps({name: ensure_picklable(name, getattr(spec, name)) for name in names})


def unpickle_spec(payload: bytes) -> WorkerSpec:
    """The spec back from ``pickle_spec``; what unpickling raises carries a note that names the field."""
    fields = {}
    for name, data in pickle.loads(payload).items():
        try:
            fields[name] = pickle.loads(data)
        except (ImportError, AttributeError) as exc:
            exc.add_note(f"while the rollout worker's process loaded {name}; it must be importable there")
            raise
    return WorkerSpec(**fields)


def describe_exit(exit_code: int, begun: bool) -> str:
    """What an exit code tells about a process that left no traceback.

    Args:
        exit_code: as ``multiprocessing`` gives it: below 0 for a signal.
        begun: whether the process got as far as the worker's own code.
    """
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"was ended by signal {name}{hint}"
    if begun:
        return (
            f"ended with exit code {exit_code} in the middle of its work: a reward function, tool, environment or hook "
            "has called os._exit, or native code that it uses has"
        )
    return (
        f"ended with exit code {exit_code} before its own code began; what it printed above tells why. It imports the "
        'main script again, so the script must start training under `if __name__ == "__main__":`, and must be a file '
        "that can be imported (not standard input)"
    )


def refuse_in_worker() -> None:
    """Stops a main script that starts training whenever it is imported: the worker's process imports it too.

    Raises:
        ConfigError: this is the worker's process.
    """
    if multiprocessing.current_process().name == PROCESS_NAME:
        raise ConfigError(
            "the rollout worker's process imports the main script, and that has tried to start training once more: put "
            'what builds the trainer and calls train() under `if __name__ == "__main__":`'
        )


_environment_lock = threading.Lock()


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the ``with`` block: a spawned process inherits them from its first instruction on,
    which setting them inside it would not achieve (it imports the main script first)."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _SendThread:
    """Writes to the trainer's pipe, so that the event loop never waits for it."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._pending: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-sender", daemon=True)
        self._thread.start()

    def put(self, kind: str, content: Any) -> None:
        self._pending.put((kind, content))

    def close(self, timeout_s: float) -> None:
        """Waits until everything is written, or ``timeout_s`` is over."""
        self._pending.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the trainer is gone, and the watch ends this process
            while (message := self._pending.get()) is not None:
                self._connection.send(message)


def _child_main(spec_inbox: Connection, state: SharedState, outbox: Connection) -> None:
    """Runs the loop and reports how it ended."""
    state.begun = 1
    # Ctrl-C, and a scheduler's SIGTERM, reach both processes; the trainer decides, and stops this one in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="[rollout worker] %(levelname)s %(name)s: %(message)s")
    sender = _SendThread(outbox)
    exit_code = 0
    try:
        spec = unpickle_spec(spec_inbox.recv_bytes())
        asyncio.run(_run_loop(spec, state, sender))
    except BaseException:  # whatever ended the loop, the trainer must hear of it
        sender.put(_ERROR, traceback.format_exc())
        exit_code = 1
    sender.close(FLUSH_TIMEOUT_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not sys.exit: it would wait for a reward function that never returns.
    os._exit(exit_code)


async def _run_loop(spec: WorkerSpec, state: SharedState, sender: _SendThread) -> None:
    from ajgrpo.rollout.loop import AsyncRolloutLoop  # slow imports belong to the worker's process

    loop_cls: type[AsyncRolloutLoop] = spec.loop_cls or AsyncRolloutLoop
    loop = loop_cls(
        spec,
        state=state,
        publish=lambda item: sender.put(_ITEM, item),
        report=lambda observations: sender.put(_METRICS, observations),
    )
    await loop.run()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
