"""Every exception that ajgrpo raises on purpose.

    AjgrpoError
    ├── ConfigError (also ValueError)     a configuration that cannot work; lists all violations
    ├── DatasetError (also ValueError)    a dataset that cannot be trained on
    ├── PicklingError (also TypeError)    something given to the worker that cannot be pickled
    ├── RewardError                       a reward function that raised or returned something unusable
    ├── CheckpointError                   a model directory or checkpoint that cannot be read or written
    │   ├── UnsupportedModelError         a model that ajgrpo does not implement
    │   └── KeyMismatchError              missing, unexpected or misshaped tensors, all in one message
    ├── ServerError                       the rollout server
    │   ├── ServerUnreachableError        nothing answers at the address
    │   ├── ServerTimeoutError            a named wait passed its bound
    │   ├── ServerResponseError           an HTTP error, with the server's own message
    │   └── ServerIncompatibleError       the server answers, but lacks what training needs
    ├── WeightTransferError               a weight push failed, with the phase's name
    ├── RolloutWorkerError                the rollout worker
    │   ├── WorkerDiedError               its process ended or raised; holds its own traceback
    │   └── WorkerStalledError            no heartbeat within the bound
    ├── TrainingStalledError              nothing trainable arrives, with the reason
    └── TrainingDivergedError             a gradient that is not finite

Messages state the rule, the value that was met and what to set.
"""

from __future__ import annotations

from collections.abc import Sequence


class AjgrpoError(Exception):
    """Base of every exception that ajgrpo raises on purpose."""


class ConfigError(AjgrpoError, ValueError):
    """A configuration that cannot work.

    Args:
        violations: one sentence for each violated rule; the message shows them all.
    """

    def __init__(self, violations: str | Sequence[str]):
        self.violations: tuple[str, ...] = (violations,) if isinstance(violations, str) else tuple(violations)
        if len(self.violations) == 1:
            message = self.violations[0]
        else:
            lines = "\n".join(f"  - {violation}" for violation in self.violations)
            message = f"{len(self.violations)} configuration errors:\n{lines}"
        super().__init__(message)


class DatasetError(AjgrpoError, ValueError):
    """A dataset that cannot be trained on (missing, empty, or not conversational)."""


class PicklingError(AjgrpoError, TypeError):
    """An object given to the rollout worker that cannot be pickled; the message names it."""


class RewardError(AjgrpoError):
    """A reward function that raised, or returned something that is not one float or None per rollout."""


class CheckpointError(AjgrpoError):
    """A model directory or a training checkpoint that cannot be read or written."""


class UnsupportedModelError(CheckpointError):
    """A model that ajgrpo does not implement; the message lists what is supported."""


class KeyMismatchError(CheckpointError):
    """Checkpoint tensors that do not match the model.

    Args:
        source: the directory or stream that was read.
        missing: names that the model needs and the source lacks.
        unexpected: names that the source holds and the model does not know.
        misshaped: sentences such as ``"name: expected (4, 8), found (8, 4)"``.
    """

    def __init__(
        self, source: str, missing: Sequence[str] = (), unexpected: Sequence[str] = (), misshaped: Sequence[str] = ()
    ):
        self.missing, self.unexpected, self.misshaped = tuple(missing), tuple(unexpected), tuple(misshaped)
        parts = [f"the tensors of {source} do not match the model"]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped)):
            if names:
                parts.append(f"  {title} ({len(names)}): " + ", ".join(names))
        super().__init__("\n".join(parts))


class ServerError(AjgrpoError):
    """A failure of the rollout server or of the way to it."""


class ServerUnreachableError(ServerError):
    """Nothing answers at the server's address."""


class ServerTimeoutError(ServerError):
    """A named wait on the server passed its bound."""


class ServerResponseError(ServerError):
    """The server answered with an HTTP error.

    Args:
        request: method and path, for example ``"POST /pause"``.
        status: HTTP status code.
        message: the server's own message.
    """

    def __init__(self, request: str, status: int, message: str):
        self.request, self.status, self.message = request, status, message
        super().__init__(f"{request} answered {status}: {message}")


class ServerIncompatibleError(ServerError):
    """The server answers, but lacks something that training needs; the message names the flag to set."""


class WeightTransferError(AjgrpoError):
    """A weight push failed.

    Args:
        phase: the step that failed: ``init``, ``pause``, ``start``, ``update``, ``finish`` or ``resume``.
        message: what happened and what to do.
    """

    def __init__(self, phase: str, message: str):
        self.phase = phase
        super().__init__(f"weight transfer failed in phase '{phase}': {message}")


class RolloutWorkerError(AjgrpoError):
    """A failure of the rollout worker."""


class WorkerDiedError(RolloutWorkerError):
    """The worker's process raised or ended; the message holds its own traceback."""


class WorkerStalledError(RolloutWorkerError):
    """The worker gave no heartbeat within its bound."""


class TrainingStalledError(AjgrpoError):
    """No trainable sample arrived within the bound; the message says why."""


class TrainingDivergedError(AjgrpoError):
    """A gradient was not finite; the parameters are those of the step before."""
