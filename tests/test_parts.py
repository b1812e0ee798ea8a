import json

import pytest

from ajgrpo import cli, parts
from ajgrpo.callbacks import TrainerCallback
from ajgrpo.errors import ConfigError


class Maze:
    pass


def my_reward(completions, **kwargs):
    return [0.0 for _ in completions]


def run_config(**options):
    return cli.RunConfig(**{"model": "m", "dataset": "d", "reward_funcs": ["tests.test_parts.my_reward"], **options})


def test_trainer_arguments(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}) + "\n")
    run = run_config(
        dataset=str(tmp_path / "d.jsonl"),
        tools="tests.test_parts.my_reward",
        callbacks=["ajgrpo.TrainerCallback"],
        environment_factory={"maze": "tests.test_parts.Maze"},
    )
    arguments = parts.trainer_arguments(run)
    dataset = arguments.pop("train_dataset")
    assert dataset.to_list() == [{"prompt": [{"role": "user", "content": "hi"}]}]
    assert arguments == {
        "model": "m",
        "reward_funcs": [my_reward],
        "args": run.training,
        "callbacks": [TrainerCallback],
        "tools": [my_reward],
        "environment_factory": {"maze": Maze},
    }


def test_bare_names_are_those_of_ajgrpo_rewards():
    from ajgrpo import rewards

    assert parts.reward_function("exact_match_reward") is rewards.exact_match_reward
    with pytest.raises(ConfigError, match=r"not in ajgrpo\.rewards; did you mean 'exact_match_reward'"):
        parts.reward_function("exact_match_rewards")


def test_what_is_not_callable_is_refused():
    with pytest.raises(ConfigError, match=r"reward function 'ajgrpo\.config\.SECRETS' must be callable, got tuple"):
        parts.reward_function("ajgrpo.config.SECRETS")
    with pytest.raises(ConfigError, match=r"environment 'maze' 'ajgrpo\.config\.SECRETS' must be callable"):
        parts.environment_factory({"maze": "ajgrpo.config.SECRETS"})


def test_builtin_models(tmp_path, monkeypatch):
    (tmp_path / "tiny_counter").mkdir()
    (tmp_path / "tiny_counter" / "config.json").write_text("{}")
    monkeypatch.setattr(parts, "ASSETS", tmp_path)
    assert parts.model_source("builtin:tiny-counter") == str(tmp_path / "tiny_counter")
    assert parts.model_source("org/name") == "org/name"
    with pytest.raises(ConfigError, match="the built-in models are: builtin:tiny-counter"):
        parts.model_source("builtin:tiny")


def test_the_builtin_models_that_ship():
    assert parts.model_source("builtin:tiny-arithmetic") == str(parts.ASSETS / "tiny_arithmetic")
