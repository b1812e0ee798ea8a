"""Callbacks: hooks that a user adds to the training loop.

    on_train_begin
      on_step_begin ─▶ (optimizer step) ─▶ on_step_end ─▶ [on_log] ─▶ [on_save]      repeated
    on_train_end

A callback steers training through the flags of ``TrainerControl``. Left out: evaluation hooks (there is no evaluation
loop) and hooks inside a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError


@dataclasses.dataclass
class TrainerState:
    """Where training stands. Example: ``TrainerState(global_step=12, epoch=0.4, max_steps=100)``.

    Attributes:
        global_step: optimizer steps done.
        epoch: passes over the prompts done, as a fraction.
        max_steps: optimizer steps after which training stops; -1 when the number of epochs decides.
        num_tokens: tokens forwarded so far, shared prefixes once.
        log_history: one record per log window: its metrics and ``step``.
    """

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = -1
    num_tokens: int = 0
    log_history: list[dict[str, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class TrainerControl:
    """What the loop shall do next; callbacks set the flags and the trainer clears ``should_save``/``should_log``.

    Attributes:
        should_training_stop: stop after this step.
        should_save: write a checkpoint after this step.
        should_log: close the log window after this step.
    """

    should_training_stop: bool = False
    should_save: bool = False
    should_log: bool = False


class TrainerCallback:
    """Base class of callbacks: every hook does nothing; override those that are needed.

    A hook may be called with further keyword arguments in later versions, so it must accept ``**kwargs``. What a hook
    raises ends training.
    """

    def on_train_begin(
        self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the first step; the server holds the first weights."""

    def on_step_begin(self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the samples of a step are taken from the queue."""

    def on_step_end(self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After an optimizer step; ``state.global_step`` counts it."""

    def on_log(self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a log window was closed; ``kwargs["logs"]`` holds its metrics by name."""

    def on_save(self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a checkpoint was written."""

    def on_train_end(self, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the last step, before the parts are shut down."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
"""The names of the hooks."""


class CallbackHandler:
    """Calls the callbacks in the order in which they were added.

    Args:
        callbacks: instances or classes (which are instantiated) of ``TrainerCallback``.

    Raises:
        ConfigError: for anything else.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = ()) -> None:
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback after the others."""
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise ConfigError(
                f"a callback must be an instance or subclass of ajgrpo.TrainerCallback, got {callback!r}; let its "
                "class inherit from ajgrpo.TrainerCallback"
            )
        self.callbacks.append(made)

    def call(
        self, event: str, args: AsyncGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Calls hook ``event`` (one of ``EVENTS``) of every callback."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; the events are {', '.join(EVENTS)}")
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, **kwargs)
