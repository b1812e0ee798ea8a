"""The command line of ``python -m ajgrpo.train``: YAML file, overrides, and all their errors at once.

    argv ──▶ tokens ──▶ values: defaults < file < --key value ──▶ RunConfig (training: AsyncGRPOConfig)

Left out: importing what the keys name (``parts.py``); so ``--help`` needs no heavy package.
"""

from __future__ import annotations

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ajgrpo import yaml_dialect
from ajgrpo.config import SECRETS, SECTIONS, AsyncGRPOConfig, default_of, option, type_violations
from ajgrpo.errors import ConfigError
from ajgrpo.imports import nearest

DEFAULT_TRAINER = "ajgrpo.trainer.AsyncGRPOTrainer"

FLAGS = {
    "help": "Show this text.",
    "print_config": "Print the resolved configuration as YAML and stop.",
    "dry_run": "Check everything that can be checked without training, estimate memory, and stop.",
    "traceback": "Show the traceback of an error instead of its message alone.",
}


@dataclasses.dataclass(kw_only=True)
class RunConfig:
    """What a run trains, on what, with which parts; ``training`` holds the trainer's own options.

    Raises:
        ConfigError: listing every violated rule.
    """

    training: AsyncGRPOConfig = dataclasses.field(default_factory=AsyncGRPOConfig)
    model: str = option("", "Model: a directory in Hugging Face format, a hub id, or builtin:NAME. Required.")
    dataset: str | None = option(
        None, "Prompts: a file (.jsonl, .json, .parquet, .csv), a directory, a hub id, or `module.function`."
    )
    dataset_split: str = option("train", "Split of the dataset.")
    dataset_name: str | None = option(None, "Configuration of a hub dataset.")
    dataset_kwargs: dict[str, Any] = option({}, "Keyword arguments of the dataset's function or loader.")
    reward_funcs: list[str] | str = option([], "Reward functions: names of ajgrpo.rewards, or `module.function`.")
    tools: list[str] | str = option([], "Tools that the model may call: `module.function`.")
    environment_factory: str | dict[str, str] | None = option(
        None, "Environment: `module.Class`, or a mapping of names to them."
    )
    callbacks: list[str] | str = option([], "Trainer callbacks: `module.Class`.")
    trainer: str = option(DEFAULT_TRAINER, "Trainer: `module.Class`, a subclass of AsyncGRPOTrainer.")
    resume_from_checkpoint: str | bool | None = option(
        None, "Checkpoint to go on from; `true`: the newest one of output_dir."
    )

    def __post_init__(self) -> None:
        for name in ("reward_funcs", "tools", "callbacks"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
        if violations := [*type_violations(self).values(), *self.violations()]:
            raise ConfigError(violations)

    def violations(self) -> list[str]:
        """One sentence for each violated rule."""
        rules = [
            (bool(self.model), "model is required: a directory, a hub id or builtin:NAME"),
            (
                self.dataset is not None or self.environment_factory is not None,
                "dataset is required (or environment_factory, whose reset() gives the prompts)",
            ),
            (
                self.dataset is not None or self.environment_factory is None or self.training.max_steps > 0,
                "max_steps is required when there is no dataset: an epoch has no length",
            ),
            (
                bool(self.reward_funcs) or self.environment_factory is not None or self.trainer != DEFAULT_TRAINER,
                "reward_funcs is required: names of ajgrpo.rewards, or module.function",
            ),
        ]
        return [message for holds, message in rules if not holds]


RUN_FIELDS = {field.name: field for field in dataclasses.fields(RunConfig) if field.name != "training"}
TRAINING_FIELDS = {field.name: field for field in dataclasses.fields(AsyncGRPOConfig)}
FIELDS = {**RUN_FIELDS, **TRAINING_FIELDS}
"""Every key of a configuration file."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line. ``run`` is None exactly for ``--help``."""

    flags: frozenset[str]
    run: RunConfig | None


def parse(argv: Sequence[str]) -> Command:
    """Parses the command line and the file that it names.

    Raises:
        ConfigError: listing every violated rule of command line, file and values.
    """
    problems: list[str] = []
    flags: set[str] = set()
    overrides: list[tuple[str, str | None]] = []
    file_values: dict[str, Any] = {}
    for name, text in _options(argv, problems):
        if name in FLAGS:
            flags.add(name)
            if text is not None:
                problems.append(f"--{name} takes no value, got {text!r}")
        elif name == "config":
            file_values |= _read_file(text, problems)
        else:
            overrides.append((name, text))
    if "help" in flags:
        return Command(frozenset(flags), None)
    values = _known_values(file_values, problems)
    for name, text in overrides:
        _apply_override(values, name, text, problems)
    return Command(frozenset(flags), _build(values, problems))


def _options(argv: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str | None]]:
    """The (key, value text) pairs of a command line; the value is None where none follows."""
    tokens = ["--help" if token == "-h" else token for token in argv]
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        key, equals, text = token[2:].partition("=")
        first, dot, rest = key.partition(".")
        name = first.replace("-", "_") + dot + rest
        if not token.startswith("--") or not first:
            problems.append(f"unexpected argument {token!r}; options are written --key value or --key=value")
        elif equals:
            yield name, text
        elif name not in FLAGS and index < len(tokens) and not tokens[index].startswith("--"):
            yield name, tokens[index]
            index += 1
        else:
            yield name, None


def _read_file(path: str | None, problems: list[str]) -> dict[str, Any]:
    if path is None:
        problems.append("--config needs a value: the path of a YAML file")
        return {}
    try:
        values = yaml_dialect.load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"--config {path}: {error.strerror}")
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"--config {path} is not valid YAML: {error}")
    else:
        if values is None or isinstance(values, dict):
            return values or {}
        problems.append(f"--config {path} must hold keys and values, got {type(values).__name__}")
    return {}


def _known_values(values: Mapping[Any, Any], problems: list[str]) -> dict[str, Any]:
    """The values of known keys; the others become problems."""
    for key in values:
        if key not in FIELDS:
            problems.append(f"unknown key {key!r} in the configuration file{nearest(str(key), FIELDS)}")
    return {key: value for key, value in values.items() if key in FIELDS}


def _apply_override(values: dict[str, Any], name: str, text: str | None, problems: list[str]) -> None:
    """Sets the value of ``--name text``; ``name`` may go into a mapping with dots."""
    key, *path = name.split(".")
    if key not in FIELDS:
        problems.append(f"unknown option --{name}{nearest(key, [*FIELDS, *FLAGS, 'config'])}")
        return
    kinds = _kinds(key)
    if path and dict not in kinds:
        problems.append(f"--{name}: {key} holds a single value, not keys")
        return
    if text is None and (path or bool not in kinds):
        problems.append(f"--{name} needs a value")
        return
    try:
        value = True if text is None else _parse_value(text, {Any} if path else kinds)
    except yaml.YAMLError as error:
        problems.append(f"--{name}: {text!r} is not valid YAML: {getattr(error, 'problem', error)}")
        return
    if not path:
        values[key] = value
        return
    current = values.get(key, default_of(FIELDS[key]))
    node = values[key] = dict(current) if isinstance(current, dict) else {}
    for part in path[:-1]:
        child = node.get(part)
        node[part] = dict(child) if isinstance(child, dict) else {}
        node = node[part]
    node[path[-1]] = value


def _kinds(key: str) -> set[Any]:
    """The types that a key's value may have, containers without their elements."""
    owner = RunConfig if key in RUN_FIELDS else AsyncGRPOConfig
    hint = typing.get_type_hints(owner)[key]
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return {typing.get_origin(alternative) or alternative for alternative in alternatives}


def _parse_value(text: str, kinds: set[Any]) -> Any:
    """The value of an option's text: as it stands where only text is expected, else as YAML."""
    if str in kinds and kinds <= {str, type(None)}:
        return None if text == "null" and type(None) in kinds else text
    return yaml_dialect.load(text)


def _build(values: Mapping[str, Any], problems: list[str]) -> RunConfig:
    try:
        training = AsyncGRPOConfig(**{key: value for key, value in values.items() if key in TRAINING_FIELDS})
    except ConfigError as error:
        problems.extend(error.violations)
        training = AsyncGRPOConfig(max_steps=1)  # stands in while the other rules are checked
    try:
        run = RunConfig(training=training, **{key: value for key, value in values.items() if key in RUN_FIELDS})
    except ConfigError as error:
        problems.extend(error.violations)
    if problems:
        raise ConfigError(problems)
    return run


def help_text() -> str:
    """What ``--help`` prints: every key with its type, default and meaning."""
    lines = [
        "usage: python -m ajgrpo.train --config FILE [--KEY VALUE ...]",
        "",
        "Trains a language model with asynchronous GRPO. Every key below may stand in the YAML file and be overridden",
        "on the command line; keys inside a mapping are written with a dot, such as --mesh.fsdp 2.",
        "",
        "Command",
        *_help_entry("--config FILE", "YAML file with the keys below."),
    ]
    for name, meaning in FLAGS.items():
        lines += _help_entry(f"--{name}", meaning)
    lines += ["", "Run"]
    for name, field in FIELDS.items():
        if name in SECTIONS:
            lines += ["", SECTIONS[name]]
        default = default_of(field)
        shown = default if isinstance(default, str) and default else yaml_dialect.inline(default)
        lines += _help_entry(f"--{name}", f"{field.metadata['help']} [{field.type}, default {shown}]")
    return "\n".join(lines) + "\n"


def _help_entry(option_text: str, meaning: str) -> list[str]:
    indent = " " * 38
    first, *rest = textwrap.wrap(meaning, 120 - len(indent), break_on_hyphens=False)
    head = f"  {option_text}".ljust(len(indent))
    return [head + first if head.endswith(" ") else f"{head} {first}", *(indent + line for line in rest)]


def config_text(run: RunConfig) -> str:
    """What ``--print_config`` prints: YAML that parses back to ``run``, without secrets."""
    values = {name: getattr(run, name) for name in RUN_FIELDS}
    values |= {name: None if name in SECRETS else getattr(run.training, name) for name in TRAINING_FIELDS}
    return yaml_dialect.dump(values)
