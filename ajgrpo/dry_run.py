"""``--dry_run``: checks everything that can be checked without training, and estimates memory.

Each check is a line of a table. A check that needs what an earlier one could not give is marked as not checked, so that
one mistake is reported once. Left out: reading the weights, generating, and what the server does with a weight push.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ajgrpo import parts, preflight
from ajgrpo.callbacks import CallbackHandler
from ajgrpo.cli import RunConfig
from ajgrpo.config import EMBEDDED, AsyncGRPOConfig
from ajgrpo.data import check_dataset
from ajgrpo.errors import AjgrpoError, CheckpointError, ConfigError
from ajgrpo.hf.io import read_config, resolve_model
from ajgrpo.inference.client import ControlClient
from ajgrpo.loggers import require_tracker
from ajgrpo.losses.builder import build_loss
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import abstract_params, param_logical_axes
from ajgrpo.preflight import Finding
from ajgrpo.rollout.worker import ensure_picklable
from ajgrpo.tokenizer import read_tokenizer, require_chat_template
from ajgrpo.training.optimizer import build_optimizer
from ajgrpo.training.sharding import make_mesh

SERVER_TIMEOUT_S = 10.0
"""A server that is up answers at once; a dry run does not wait for one that is starting."""

UNIT_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def dry_run(run: RunConfig, console: Console | None = None) -> int:
    """Prints the table of findings. Returns 0 when nothing failed, else 1."""
    return print_findings(findings(run), "dry run: nothing is trained", console)


def print_findings(found: Sequence[Finding], title: str, console: Console | None = None) -> int:
    """Prints a table of findings. Returns 0 when nothing failed, else 1."""
    table = Table("check", "result", "detail", title=title, title_justify="left")
    for finding in found:
        style = {"ok": "green", "failed": "bold red"}.get(finding.status, "yellow")
        table.add_row(finding.title, f"[{style}]{finding.status}[/]", finding.detail.replace("[", r"\["))
    (Console() if console is None else console).print(table)
    return 1 if any(finding.status == "failed" for finding in found) else 0


@contextlib.contextmanager
def server_client(training: AsyncGRPOConfig) -> Iterator[ControlClient]:
    """A client that does not wait for a server that is only starting."""
    timeout_s = min(SERVER_TIMEOUT_S, training.vllm_server_timeout)
    with contextlib.closing(ControlClient(training.vllm_server_base_url, timeout_s=timeout_s)) as client:
        yield client


def findings(run: RunConfig) -> list[Finding]:
    """Runs every check."""
    checks = Checks(run)
    titles: list[tuple[str, Callable[[], str], tuple[str, ...]]] = [
        ("model", checks.model, ()),
        ("tokenizer", checks.check_tokenizer, ("model",)),
        ("dataset", checks.dataset, ()),
        ("reward functions", checks.rewards, ()),
        ("tools and environment", checks.tools, ()),
        ("callbacks and trackers", checks.observers, ()),
        ("loss", checks.loss, ()),
        ("trainer", checks.trainer, ()),
        ("output and resume", checks.files, ()),
        ("devices", checks.devices, ()),
        ("memory", checks.memory, ("model", "devices")),
        ("server", checks.server, ()),
    ]
    found: list[Finding] = []
    for title, check, needs in titles:
        if lacking := [finding.title for finding in found if finding.title in needs and finding.status != "ok"]:
            found.append(Finding(title, "not checked", f"needs the {lacking[0]}"))
            continue
        try:
            found.append(Finding(title, "ok", check()))
        except AjgrpoError as error:
            found.append(Finding(title, "failed", str(error)))
    return found


class Checks:
    """The checks. Each returns what it found in one line, or raises an ``AjgrpoError``."""

    def __init__(self, run: RunConfig) -> None:
        self.run, self.training = run, run.training

    @functools.cached_property
    def directory(self) -> Path:
        """Where the model lies; a hub model is downloaded."""
        options = self.training.model_init_kwargs or {}
        return resolve_model(parts.model_source(self.run.model), revision=options.get("revision"))

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        return read_config(self.directory)[1]

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.directory, self.training.trust_remote_code)

    def model(self) -> str:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(self.model_config)))
        return f"{self.model_config.model_type}, {count / 1e6:.4g}M parameters, {self.directory}"

    def check_tokenizer(self) -> str:
        require_chat_template(self.tokenizer, self.directory)
        return f"{len(self.tokenizer)} tokens, chat template of {len(self.tokenizer.chat_template)} characters"

    def dataset(self) -> str:
        dataset = parts.dataset(self.run)
        if dataset is None:
            return "none: the environment gives the prompts"
        check_dataset(dataset, require_prompt=self.run.environment_factory is None)
        ensure_picklable("train_dataset", dataset)
        size = f"{len(dataset)} rows" if isinstance(dataset, Dataset) else "streaming"
        return f"{size}, columns {', '.join(dataset.column_names or next(iter(dataset)))}"

    def rewards(self) -> str:
        for name in self.run.reward_funcs:
            ensure_picklable(f"reward function {name}", parts.reward_function(name))
        return ", ".join(self.run.reward_funcs) or "none"

    def tools(self) -> str:
        for name, tool in zip(self.run.tools, parts.tools(self.run), strict=True):
            ensure_picklable(f"tool {name}", tool)
        ensure_picklable("environment_factory", parts.environment_factory(self.run.environment_factory))
        environment = self.run.environment_factory
        return ", ".join([*self.run.tools, *([str(environment)] if environment else [])]) or "none"

    def observers(self) -> str:
        CallbackHandler(parts.callbacks(self.run))
        for name in self.training.report_to:
            require_tracker(name)
        return ", ".join([*self.run.callbacks, *self.training.report_to]) or "none besides metrics.jsonl"

    def loss(self) -> str:
        build_loss(self.training)
        return self.training.loss or ("score_centering" if self.training.score_centering else "clipped")

    def trainer(self) -> str:
        parts.trainer_class(self.run)
        return self.run.trainer

    def files(self) -> str:
        output = Path(self.training.output_dir).absolute()
        existing = next(path for path in (output, *output.parents) if path.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise ConfigError(
                f"output_dir {str(output)!r} cannot be written: {str(existing)!r} is not a writable directory"
            )
        resume = self.run.resume_from_checkpoint
        if isinstance(resume, str) and not Path(resume).is_dir():
            raise CheckpointError(f"resume_from_checkpoint: there is no directory {resume!r}")
        return f"{output}" + (f", resuming from {resume}" if resume else "")

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return make_mesh(self.training.mesh)

    def devices(self) -> str:
        device = jax.devices()[0]
        shape = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return f"{jax.device_count()} × {device.device_kind}; mesh: {shape}"

    def memory(self) -> str:
        parts_by_name = state_bytes(self.run, self.model_config)
        shards = self.mesh.shape["fsdp"]
        sizes = [f"{name} {readable(size / shards)}" for name, size in parts_by_name.items()]
        total = readable(sum(parts_by_name.values()) / shards)
        stats = jax.devices()[0].memory_stats() or {}
        limit = f" of {readable(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        return f"about {total}{limit} a device ({', '.join(sizes)}); activations come on top"

    def server(self) -> str:
        url = self.training.vllm_server_base_url
        if url == EMBEDDED:
            return "embedded: started by the trainer"
        needs = preflight.needs_of(self.training)
        with server_client(self.training) as control:
            found = preflight.inspect(control, needs)
        preflight.require(found)
        return found[0].detail


def state_bytes(run: RunConfig, config: ModelConfig) -> dict[str, int]:
    """Bytes over all shards of the arrays that live as long as training; gradients and optimizer are in float32."""
    # "auto" keeps the checkpoint's dtype, at most four bytes.
    dtype = jnp.dtype("float32" if run.training.dtype == "auto" else run.training.dtype)
    params, float32 = abstract_params(config, dtype), abstract_params(config, jnp.dtype("float32"))
    optimizer = build_optimizer(run.training, param_logical_axes(config))
    return {
        "weights": tree_bytes(params),
        "gradients": tree_bytes(float32),
        "optimizer": tree_bytes(jax.eval_shape(optimizer.init, float32)),
    }


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree of arrays or ``ShapeDtypeStruct``."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def readable(size: float) -> str:
    """A number of bytes for people. Example: ``readable(1536) == "1.5 KiB"``."""
    exponent = 0
    while size >= 1024 and exponent < len(UNIT_NAMES) - 1:
        size, exponent = size / 1024, exponent + 1
    return f"{size:.4g} {UNIT_NAMES[exponent]}"
