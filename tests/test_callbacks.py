import pytest

from ajgrpo.callbacks import EVENTS, CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError


class StopAtThree(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 3


class Recorder(TrainerCallback):
    def __init__(self, name="recorder", events=None):
        self.name, self.events = name, [] if events is None else events

    def on_log(self, args, state, control, **kwargs):
        self.events.append((self.name, state.global_step, kwargs["logs"]))


def test_the_hooks():
    assert EVENTS == ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save", "on_train_end")


def test_every_hook_of_the_base_class_does_nothing():
    state, control = TrainerState(), TrainerControl()
    handler = CallbackHandler([TrainerCallback])
    for event in EVENTS:
        handler.call(event, AsyncGRPOConfig(), state, control, logs={})
    assert (state, control) == (TrainerState(), TrainerControl())


def test_a_callback_steers_through_the_control():
    control = TrainerControl()
    handler = CallbackHandler([StopAtThree])
    stopped = []
    for step in (1, 2, 3):
        handler.call("on_step_end", AsyncGRPOConfig(), TrainerState(global_step=step), control)
        stopped.append(control.should_training_stop)
    assert stopped == [False, False, True]


def test_callbacks_run_in_the_order_in_which_they_were_added():
    events = []
    handler = CallbackHandler([Recorder("first", events)])
    handler.add(Recorder("second", events))
    handler.call("on_log", AsyncGRPOConfig(), TrainerState(global_step=7), TrainerControl(), logs={"loss": 0.5})
    assert events == [("first", 7, {"loss": 0.5}), ("second", 7, {"loss": 0.5})]


def test_what_a_hook_raises_is_not_swallowed():
    handler = CallbackHandler([Recorder()])
    with pytest.raises(KeyError, match="logs"):
        handler.call("on_log", AsyncGRPOConfig(), TrainerState(), TrainerControl())


@pytest.mark.parametrize("wrong", [object(), dict, print])
def test_anything_else_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"must be an instance or subclass of ajgrpo\.TrainerCallback"):
        CallbackHandler([wrong])


def test_an_unknown_event_is_refused():
    with pytest.raises(ValueError, match="unknown event 'on_evaluate'"):
        CallbackHandler().call("on_evaluate", AsyncGRPOConfig(), TrainerState(), TrainerControl())
