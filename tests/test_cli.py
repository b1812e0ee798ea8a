import subprocess
import sys

import pytest

from ajgrpo import cli, yaml_dialect
from ajgrpo.errors import ConfigError

REQUIRED = ["--model", "m", "--dataset", "d.jsonl", "--reward_funcs", "exact_match_reward"]


def parse(*argv):
    return cli.parse([*REQUIRED, *argv]).run


def violations(*argv):
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)
    return list(caught.value.violations)


def test_defaults_file_and_command_line_in_this_order(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: from-file\ndataset: d.jsonl\nreward_funcs: [a.b]\nlearning_rate: 1e-5\nseed: 7\n")
    run = cli.parse(["--config", str(path), "--seed", "9", "--model=from-command-line"]).run
    assert (run.model, run.dataset, run.reward_funcs) == ("from-command-line", "d.jsonl", ["a.b"])
    assert (run.training.learning_rate, run.training.seed, run.training.num_generations) == (1e-5, 9, 8)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--learning_rate", "1e-6"], "learning_rate", 1e-6),
        (["--learning-rate=2e-6"], "learning_rate", 2e-6),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_steps", "3", "--max_steps", "5"], "max_steps", 5),
        (["--score_centering", "false"], "score_centering", False),
        (["--log_completions"], "log_completions", True),
        (["--log_completions", "--seed", "1"], "log_completions", True),
        (["--save_strategy", "no"], "save_strategy", "no"),
        (["--run_name", "2026-01-01"], "run_name", "2026-01-01"),
        (["--run_name", "17"], "run_name", "17"),
        (["--run_name", "a: b #c"], "run_name", "a: b #c"),
        (["--run_name", "null"], "run_name", None),
        (["--run_name=a=b"], "run_name", "a=b"),
        (["--token_budget", "null"], "token_budget", None),
        (["--report_to", "[tensorboard, wandb]"], "report_to", ["tensorboard", "wandb"]),
        (["--report_to", "tensorboard"], "report_to", ["tensorboard"]),
        (["--mesh", "{data: 2, fsdp: 4}"], "mesh", {"data": 2, "fsdp": 4}),
        (["--mesh.fsdp", "2"], "mesh", {"data": 1, "fsdp": 2}),
        (["--mesh", "{data: 2}", "--mesh.fsdp=3"], "mesh", {"data": 2, "fsdp": 3}),
        (["--model_init_kwargs.revision", "main"], "model_init_kwargs", {"revision": "main"}),
    ],
)
def test_overrides_of_training_options(argv, name, value):
    got = getattr(parse(*argv).training, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--dataset_kwargs.size", "10"], "dataset_kwargs", {"size": 10}),
        (["--dataset_kwargs.shape.depth", "2"], "dataset_kwargs", {"shape": {"depth": 2}}),
        (["--tools", "a.b"], "tools", ["a.b"]),
        (["--resume_from_checkpoint"], "resume_from_checkpoint", True),
        (["--resume_from_checkpoint", "out/checkpoint-5"], "resume_from_checkpoint", "out/checkpoint-5"),
        (["--environment_factory", "{maze: a.Maze}"], "environment_factory", {"maze": "a.Maze"}),
        (["--environment_factory.maze", "a.Maze"], "environment_factory", {"maze": "a.Maze"}),
    ],
)  # fmt: skip
def test_overrides_of_the_run(argv, name, value):
    assert getattr(parse(*argv), name) == value


def test_an_override_inside_a_mapping_keeps_the_rest_of_the_file_and_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("dataset_kwargs: {size: 1, inner: {a: 1, b: 2}}\n")
    run = parse("--config", str(path), "--dataset_kwargs.inner.a", "5")
    assert run.dataset_kwargs == {"size": 1, "inner": {"a": 5, "b": 2}}
    assert parse().dataset_kwargs == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learnig_rate", "1"], "unknown option --learnig_rate; did you mean 'learning_rate'?"),
        (["--dryrun"], "unknown option --dryrun; did you mean 'dry_run'?"),
        (["--mash.fsdp", "1"], "unknown option --mash.fsdp; did you mean 'mesh'?"),
        (["seed", "3"], "unexpected argument 'seed'; options are written --key value or --key=value"),
        (["--seed"], "--seed needs a value"),
        (["--mesh.fsdp"], "--mesh.fsdp needs a value"),
        (["--seed.x", "1"], "--seed.x: seed holds a single value, not keys"),
        (["--mesh", "{data: 1"], "--mesh: '{data: 1' is not valid YAML: expected ',' or '}', but got '<stream end>'"),
        (["--dry_run=yes"], "--dry_run takes no value, got 'yes'"),
        (["--seed", "ten"], "seed must be int, got 'ten' (str)"),
        (["--config"], "--config needs a value: the path of a YAML file"),
        (["--config", "absent.yaml"], "--config absent.yaml: No such file or directory"),
    ],
)
def test_what_is_wrong_on_the_command_line(argv, message):
    assert violations(*REQUIRED, *argv)[0] == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"learnig_rate: 1", "unknown key 'learnig_rate' in the configuration file; did you mean 'learning_rate'?"),
        (b"training: {}", "unknown key 'training' in the configuration file"),
        (b"seed: 1\nseed: 2", "is not valid YAML: the key 'seed' stands twice"),
        (b"seed: [1", "is not valid YAML: "),
        (b"- seed", "must hold keys and values, got list"),
        (b"\xff\xfe\xff", "is not valid YAML: "),
        (b"reward_funcs: [3]", "an entry of reward_funcs must be str, got 3 (int)"),
        (b"tools: {a: b}", "tools must be list or str, got {'a': 'b'} (dict)"),
    ],
)
def test_what_is_wrong_in_the_file(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    found = violations("--model", "m", "--dataset", "d", "--config", str(path))
    assert any(message in violation for violation in found), found


def test_all_errors_of_all_sources_come_together(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sed: 1\ntemperature: 0\nmax_steps: ten\ntrainer: 3\n")
    assert violations("--config", str(path), "--epsilonn", "1", "--top_p", "0.5", "stray") == [
        "unexpected argument 'stray'; options are written --key value or --key=value",
        "unknown key 'sed' in the configuration file; did you mean 'seed'?",
        "unknown option --epsilonn; did you mean 'epsilon'?",
        "max_steps must be int, got 'ten' (str)",
        "temperature must be above 0, got 0",
        "trainer must be str, got 3 (int)",
        "model is required: a directory, a hub id or builtin:NAME",
        "dataset is required (or environment_factory, whose reset() gives the prompts)",
    ]


def test_rules_of_the_run():
    assert violations("--model", "m", "--dataset", "d") == [
        "reward_funcs is required: names of ajgrpo.rewards, or module.function"
    ]
    assert violations("--model", "m", "--environment_factory", "a.Maze") == [
        "max_steps is required when there is no dataset: an epoch has no length"
    ]
    assert cli.parse(["--model", "m", "--environment_factory", "a.Maze", "--max_steps", "3"]).run.dataset is None
    assert cli.parse(["--model", "m", "--dataset", "d", "--trainer", "a.MyTrainer"]).run.reward_funcs == []


def test_what_print_config_prints_parses_back_and_hides_the_token(tmp_path):
    run = parse("--learning_rate", "1e-6", "--save_strategy", "no", "--mesh.fsdp", "2", "--hub_token", "secret")
    text = cli.config_text(run)
    assert "secret" not in text
    assert set(yaml_dialect.load(text)) == set(cli.FIELDS)
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    again = cli.parse(["--config", str(path), "--hub_token", "secret"]).run
    assert again == run


def test_help_lists_every_key_with_its_default_and_meaning():
    text = cli.help_text()
    for name, field in cli.FIELDS.items():
        assert f"--{name} " in text
        assert " ".join(field.metadata["help"].split()) in " ".join(text.split())
    assert "[float, default 1.0e-06]" in text
    assert max(map(len, text.splitlines())) <= 120
    assert cli.parse(["-h", "--no_such_key"]).run is None


def test_parsing_imports_no_heavy_package():
    """So that --help answers at once."""
    code = "import sys, ajgrpo.train as t; t.main(['--help']); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = loaded.splitlines()[-1]
    for heavy in ("jax", "numpy", "torch", "transformers", "datasets", "httpx", "rich", "matplotlib"):
        assert f"'{heavy}'" not in modules
    assert "'yaml'" in modules
