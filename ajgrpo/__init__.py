"""Asynchronous GRPO for language models: rollouts from a vLLM server, the trainer in JAX.

Public names load on first use, so that ``import ajgrpo`` (also in the rollout worker's process) is fast and does not
import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajgrpo.callbacks import TrainerCallback, TrainerControl, TrainerState
    from ajgrpo.config import AsyncGRPOConfig
    from ajgrpo.errors import (
        AjgrpoError,
        CheckpointError,
        ConfigError,
        DatasetError,
        KeyMismatchError,
        PicklingError,
        RewardError,
        RolloutWorkerError,
        ServerError,
        ServerIncompatibleError,
        ServerResponseError,
        ServerTimeoutError,
        ServerUnreachableError,
        TrainingDivergedError,
        TrainingStalledError,
        UnsupportedModelError,
        WeightTransferError,
        WorkerDiedError,
        WorkerStalledError,
    )
    from ajgrpo.rollout.api import RolloutWorker
    from ajgrpo.rollout.loop import AsyncRolloutLoop
    from ajgrpo.trainer import AsyncGRPOTrainer
    from ajgrpo.types import Rollout, RolloutGroup, TrainingSequence, TurnRecord
    from ajgrpo.weights.base import WeightTransfer

__version__ = "0.1.0"

_MODULES = {
    "callbacks": ("TrainerCallback", "TrainerControl", "TrainerState"),
    "config": ("AsyncGRPOConfig",),
    "errors": (
        "AjgrpoError",
        "CheckpointError",
        "ConfigError",
        "DatasetError",
        "KeyMismatchError",
        "PicklingError",
        "RewardError",
        "RolloutWorkerError",
        "ServerError",
        "ServerIncompatibleError",
        "ServerResponseError",
        "ServerTimeoutError",
        "ServerUnreachableError",
        "TrainingDivergedError",
        "TrainingStalledError",
        "UnsupportedModelError",
        "WeightTransferError",
        "WorkerDiedError",
        "WorkerStalledError",
    ),
    "rollout.api": ("RolloutWorker",),
    "rollout.loop": ("AsyncRolloutLoop",),
    "trainer": ("AsyncGRPOTrainer",),
    "types": ("Rollout", "RolloutGroup", "TrainingSequence", "TurnRecord"),
    "weights.base": ("WeightTransfer",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AjgrpoError",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutLoop",
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "KeyMismatchError",
    "PicklingError",
    "RewardError",
    "Rollout",
    "RolloutGroup",
    "RolloutWorker",
    "RolloutWorkerError",
    "ServerError",
    "ServerIncompatibleError",
    "ServerResponseError",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingDivergedError",
    "TrainingSequence",
    "TrainingStalledError",
    "TurnRecord",
    "UnsupportedModelError",
    "WeightTransfer",
    "WeightTransferError",
    "WorkerDiedError",
    "WorkerStalledError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ajgrpo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ajgrpo.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
