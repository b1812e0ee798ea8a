"""The configuration of a training run: every option with its default, its meaning and its rules.

``AsyncGRPOConfig`` checks itself at construction and reports all violated rules in one ``ConfigError``. It is an
ordinary (not frozen) dataclass, because users subclass it with ``@dataclass`` to carry options of their own, and
Python forbids a plain dataclass to inherit from a frozen one; nothing in ajgrpo assigns to it after construction.

Left out: YAML files and the command line (``cli.py``).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from typing import Any

from ajgrpo.errors import ConfigError

EMBEDDED = "embedded"
"""The value of ``vllm_server_base_url`` that starts the embedded server."""

MASTER_DTYPES = ("auto", "bfloat16", "float16", "float32")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
DECAYING_SCHEDULES = ("linear", "cosine")
UNDECAYED = ("adam", "sgd")
"""Optimizers without weight decay."""
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor")
REPORTERS = ("tensorboard", "wandb", "trackio")
SAVE_STRATEGIES = ("no", "steps", "epoch")
HUB_STRATEGIES = ("end", "every_save")
MESH_AXES = ("data", "fsdp", "tensor")

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": MASTER_DTYPES,
    "embedded_dtype": ("float32", "bfloat16"),
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "save_strategy": SAVE_STRATEGIES,
    "hub_strategy": HUB_STRATEGIES,
}
"""The allowed values of fields that hold a name."""

LEAST: dict[str, int] = {
    "num_generations": 2,  # an advantage compares a rollout with the others of its group
    "max_completion_length": 1,
    "top_k": 0,
    "num_sampler_logprobs": 0,
    "token_budget": 2,
    "max_concurrent_rollouts": 1,
    "rollout_retries": 0,
    "straggler_timeout": 0,
    "max_staleness": 0,
    "weight_sync_steps": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "canary_steps": 0,
    "canary_tolerance": 0,
    "embedded_max_num_seqs": 1,
    "embedded_max_model_len": 2,
    "epsilon": 0,
    "epsilon_high": 0,
    "router_aux_loss_coef": 0,
    "max_tool_calling_iterations": 0,
    "num_completions_to_print": 0,
    "seed": 0,
    "vllm_importance_sampling_clip_min": 0,
}
"""The least value of fields that hold a finite number (None passes where the field allows it)."""

POSITIVE = (
    "temperature",
    "vllm_server_timeout",
    "rollout_worker_timeout",
    "rollout_timeout",
    "rollout_stall_timeout",
    "adam_epsilon",
    "vllm_importance_sampling_clip_max",
)
"""Fields that hold a finite number above 0."""

SECRETS = ("hub_token",)
"""Fields that are never shown or sent to a tracker."""

SECTIONS: dict[str, str] = {
    "model_init_kwargs": "Model",
    "num_generations": "Generation",
    "vllm_server_base_url": "Server",
    "loss": "Loss",
    "max_concurrent_rollouts": "Pipeline",
    "output_dir": "Training",
    "logging_steps": "Logging and saving",
}
"""The field that opens each section of the help text."""


def option(default: Any, help: str) -> Any:
    """A dataclass field with a help text, shown by ``python -m ajgrpo.train --help``."""
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(kw_only=True)
class AsyncGRPOConfig:
    """Options of ``AsyncGRPOTrainer``. The meaning of each is in its field's ``help`` metadata.

    Raises:
        ConfigError: listing every violated rule with the field, the value and what is allowed.
    """

    # Model
    model_init_kwargs: dict[str, Any] | None = option(None, "Keyword arguments for loading the model: `revision`.")
    dtype: str = option("float32", "Dtype of the master weights: auto (the checkpoint's), bfloat16, float16, float32.")
    bf16: bool = option(True, "Compute in bfloat16. With fp16 and bf16 both off, compute is float32.")
    fp16: bool = option(False, "Compute in float16; sets bf16 off.")
    trust_remote_code: bool = option(False, "Allow tokenizers that ship their own code.")
    gradient_checkpointing: bool = option(True, "Recompute each layer in the backward pass instead of storing it.")
    router_aux_loss_coef: float | None = option(
        None, "MoE load-balancing loss weight. Unset: the model config's value; 0 disables."
    )
    mesh: dict[str, int] = option(
        {"data": 1, "fsdp": -1}, "Sizes of the device mesh axes data, fsdp, tensor; -1 takes all remaining devices."
    )
    # Generation
    num_generations: int = option(8, "Rollouts per prompt (G).")
    max_completion_length: int = option(2048, "Most tokens sampled per turn.")
    temperature: float = option(1.0, "Sampling temperature; the trainer's log-probs use the same.")
    top_p: float = option(1.0, "Nucleus sampling threshold in (0, 1]; below 1 needs top_k.")
    top_k: int = option(0, "Keep the k most likely tokens; 0 keeps all.")
    min_p: float | None = option(None, "Keep tokens at least min_p times as likely as the likeliest; needs top_k.")
    repetition_penalty: float = option(1.0, "Penalty on repeated tokens; 1.0 is off.")
    chat_template_kwargs: dict[str, Any] | None = option(None, "Keyword arguments of the chat template.")
    max_tool_calling_iterations: int | None = option(None, "Most tool-calling turns per rollout. Unset: no bound.")
    # Server
    vllm_server_base_url: str = option(
        "http://localhost:8000", "Address of the rollout server, or `embedded` to start one on this machine."
    )
    vllm_server_timeout: float = option(
        1800.0, "Seconds to wait for readiness, for each generation request and for each weight-sync call."
    )
    canary_steps: int = option(
        0, "Steps between checks that the server's log-probs are the trainer's. 0: only after the first push."
    )
    canary_tolerance: float | None = option(
        None, "Largest mean difference of log-probs that the check allows. Unset: by the compute dtype."
    )
    embedded_max_num_seqs: int = option(32, "Embedded server: requests decoded at the same time.")
    embedded_max_model_len: int | None = option(
        None, "Embedded server: longest sequence. Unset: the smaller of 2048 and the model's own limit."
    )
    embedded_dtype: str = option("float32", "Embedded server: compute dtype, float32 or bfloat16.")
    # Loss
    loss: str | None = option(
        None, "Loss: a built-in name or `module.function`. Unset: score_centering or clipped, by `score_centering`."
    )
    epsilon: float = option(0.2, "Clipping: the ratio's lower bound is 1 - epsilon.")
    epsilon_high: float | None = option(None, "Clipping: the ratio's upper bound is 1 + epsilon_high. Unset: epsilon.")
    score_centering: bool = option(True, "Subtract the score's expectation under the sampler.")
    vllm_importance_sampling_clip_min: float = option(0.5, "Tokens with a smaller importance ratio are masked.")
    vllm_importance_sampling_clip_max: float = option(5.0, "Tokens with a larger importance ratio are masked.")
    num_sampler_logprobs: int = option(8, "Most likely tokens whose log-probs the sampler reports (score centering).")
    token_budget: int | None = option(None, "Most forwarded tokens per row. Unset: the server's max_model_len.")
    # Pipeline
    max_concurrent_rollouts: int = option(512, "Most rollouts in flight.")
    max_staleness: int = option(4, "Weight updates that a sample may lag behind before it is dropped.")
    weight_sync_steps: int = option(1, "Optimizer steps between two weight pushes.")
    rollout_worker_timeout: float = option(300.0, "Seconds without a heartbeat after which the worker counts as hung.")
    rollout_timeout: float = option(3600.0, "Seconds that one rollout may take, tools and environment included.")
    rollout_retries: int = option(1, "How often a rollout that failed or took too long is tried again.")
    straggler_timeout: float | None = option(
        None, "Seconds that a group waits for the rest once half of its rollouts are in. Unset: as long as they take."
    )
    rollout_stall_timeout: float = option(
        1800.0, "Seconds without any trainable sample after which training stops and says why."
    )
    # Training
    output_dir: str = option("ajgrpo-output", "Directory for checkpoints, metrics and logs.")
    num_train_epochs: float = option(3.0, "Passes over the prompts; the stop condition when max_steps is unset.")
    max_steps: int = option(-1, "Optimizer steps; above 0 it is the stop condition.")
    learning_rate: float = option(1e-6, "Peak learning rate.")
    lr_scheduler_type: str = option("constant", "Schedule: constant, constant_with_warmup, linear, cosine.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.")
    weight_decay: float = option(0.0, "Decoupled weight decay (matrices only).")
    adam_beta1: float = option(0.9, "Adam's decay of the first moment.")
    adam_beta2: float = option(0.999, "Adam's decay of the second moment.")
    adam_epsilon: float = option(1e-8, "Adam's epsilon.")
    optim: str = option("adamw", "Optimizer: adamw, adam, sgd, lion, adafactor.")
    gradient_accumulation_steps: int = option(1, "Micro-batches per optimizer step.")
    max_grad_norm: float = option(1.0, "Clip the gradient to this global norm; 0 switches clipping off.")
    seed: int = option(42, "Seed of prompt order, request seeds and initialisation.")
    # Logging and saving
    logging_steps: int = option(1, "Optimizer steps per log window.")
    report_to: list[str] | str = option([], "Trackers besides metrics.jsonl: tensorboard, wandb, trackio.")
    run_name: str | None = option(None, "Name of the run in the trackers.")
    log_completions: bool = option(False, "Print sampled prompts and completions.")
    num_completions_to_print: int | None = option(None, "How many completions to print. Unset: all of the window.")
    disable_tqdm: bool = option(False, "Switch the progress bar off.")
    save_strategy: str = option("steps", "When to write checkpoints: no, steps, epoch.")
    save_steps: int = option(500, "Optimizer steps between checkpoints.")
    save_total_limit: int | None = option(None, "Keep only so many checkpoints, the newest.")
    save_only_model: bool = option(False, "Leave optimizer state out of checkpoints (they cannot be resumed from).")
    push_to_hub: bool = option(False, "Upload the model to the hub.")
    hub_model_id: str | None = option(None, "Repository on the hub.")
    hub_strategy: str = option("every_save", "When to upload: end, every_save.")
    hub_private_repo: bool | None = option(None, "Make the hub repository private.")
    hub_token: str | None = option(None, "Token for the hub.")

    def __post_init__(self) -> None:
        if self.fp16:
            self.bf16 = False
        if isinstance(self.report_to, str):
            self.report_to = [] if self.report_to == "none" else [self.report_to]
        if violations := self.violations():
            raise ConfigError(violations)

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward and backward pass, of weight pushes and of saved checkpoints."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def truncates_sampling(self) -> bool:
        """Whether tokens are drawn from a candidate set instead of the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or bool(self.min_p)

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or ``epsilon`` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def allowed_staleness(self) -> int:
        """Bound on the steps' worth of tokens that may be queued or in flight: ``max(max_staleness, 1)``."""
        return max(self.max_staleness, 1)

    def violations(self) -> list[str]:
        """One sentence for each violated rule; empty when the configuration is sound. Subclasses may extend it."""
        wrong = type_violations(self)
        if not wrong:
            return [*range_violations(self), *combination_violations(self)]
        # Rules on values assume the types: the fields of the wrong type are left out of them.
        sound = copy.copy(self)
        for field in dataclasses.fields(self):
            if field.name in wrong:
                setattr(sound, field.name, default_of(field))
        return [*wrong.values(), *range_violations(sound)]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default value, made anew where it has a factory."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def type_violations(config: Any) -> dict[str, str]:
    """Field name → a sentence, for the fields of a dataclass instance whose value has the wrong type."""
    hints = typing.get_type_hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    found = {name: type_violation(name, getattr(config, name), hints[name]) for name in names}
    return {name: message for name, message in found.items() if message is not None}


def type_violation(name: str, value: Any, hint: Any) -> str | None:
    """A sentence when ``value`` is not of type ``hint``; hints that are not plain types or containers always pass."""
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(alternative) or alternative for alternative in alternatives)
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return None
    accepted = (*kinds, int) if float in kinds else kinds
    # A bool is an int for Python, never a number for a person.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        return f"{name} must be {wanted}, got {value!r} ({type(value).__name__})"
    elements = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    element_hints = [typing.get_args(hint)[-1] for hint in alternatives if typing.get_origin(hint) is type(value)]
    for element in elements:
        for element_hint in element_hints:
            if message := type_violation(f"an entry of {name}", element, element_hint):
                return message
    return None


def range_violations(c: AsyncGRPOConfig) -> list[str]:
    """Rules on one field each: allowed names and bounds of numbers."""
    found = []
    for name, allowed in CHOICES.items():
        if getattr(c, name) not in allowed:
            found.append(f"{name} must be one of {', '.join(allowed)}, got {getattr(c, name)!r}")
    for name, least in LEAST.items():
        value = getattr(c, name)
        if value is not None and not least <= value < math.inf:
            found.append(f"{name} must be at least {least}, got {value}")
    for name in POSITIVE:
        if not 0 < getattr(c, name) < math.inf:
            found.append(f"{name} must be above 0, got {getattr(c, name)}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(c, name) < 1:
            found.append(f"{name} must be in [0, 1), got {getattr(c, name)}")
    for name in c.report_to:
        if name not in REPORTERS:
            found.append(f"report_to may hold {', '.join(REPORTERS)}, got {name!r}")
    if not 0 < c.top_p <= 1:
        found.append(f"top_p must be in (0, 1], got {c.top_p}")
    if c.min_p is not None and not 0 <= c.min_p <= 1:
        found.append(f"min_p must be in [0, 1], got {c.min_p}")
    if not (c.max_steps == -1 or c.max_steps > 0):
        found.append(f"max_steps must be -1 (unset) or above 0, got {c.max_steps}")
    if c.repetition_penalty != 1.0:
        found.append(
            f"repetition_penalty must be 1.0, got {c.repetition_penalty}: the trainer cannot reproduce the log-probs "
            "of a sampler that penalises repetition"
        )
    if not c.vllm_server_base_url.startswith(("http://", "https://")) and c.vllm_server_base_url != EMBEDDED:
        found.append(
            f"vllm_server_base_url must be {EMBEDDED!r} or start with http:// or https://, got "
            f"{c.vllm_server_base_url!r}"
        )
    if not c.output_dir:
        found.append("output_dir must not be empty")
    return [*found, *mesh_violations(c.mesh)]


def combination_violations(c: AsyncGRPOConfig) -> list[str]:
    """Rules on fields that must fit together."""
    low, high = c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max
    rules = [
        (
            c.top_k > 0 or not c.truncates_sampling,
            f"top_p={c.top_p} and min_p={c.min_p} need top_k > 0, which bounds the candidate set that the server "
            "returns; set top_k (for example 512)",
        ),
        (
            c.max_steps > 0 or 0 < c.num_train_epochs < math.inf,
            f"num_train_epochs must be above 0 when max_steps is unset, got {c.num_train_epochs}",
        ),
        (
            c.lr_scheduler_type not in DECAYING_SCHEDULES or c.max_steps > 0,
            f"lr_scheduler_type={c.lr_scheduler_type!r} needs max_steps: without it the length of the decay is "
            "unknown; set max_steps or use 'constant'",
        ),
        (
            c.lr_scheduler_type not in DECAYING_SCHEDULES or c.max_steps <= 0 or c.warmup_steps < c.max_steps,
            f"warmup_steps must be below max_steps, got {c.warmup_steps} and {c.max_steps}",
        ),
        (
            not c.weight_decay or c.optim not in UNDECAYED,
            f"weight_decay must be 0 with optim={c.optim!r}, which has none, got {c.weight_decay}; use 'adamw'",
        ),
        (
            low <= high,
            "vllm_importance_sampling_clip_min must not exceed vllm_importance_sampling_clip_max, got "
            f"{low} and {high}",
        ),
        (
            not c.score_centering or c.loss is not None or c.num_sampler_logprobs > 0,
            "score_centering=True needs num_sampler_logprobs of at least 1, got 0; raise it or set "
            "score_centering=False",
        ),
        (
            c.token_budget is None or c.token_budget > c.max_completion_length,
            f"token_budget must be above max_completion_length, got {c.token_budget} and {c.max_completion_length}: a "
            "completion of full length would never be trained; raise the one, lower the other, or leave token_budget "
            "unset",
        ),
        (
            not c.push_to_hub or c.hub_model_id is not None,
            "push_to_hub=True needs hub_model_id (for example 'my-name/my-model')",
        ),
    ]
    return [message for holds, message in rules if not holds]


def mesh_violations(mesh: dict[str, int]) -> list[str]:
    """Rules on the axis sizes of ``mesh``."""
    found = [f"mesh has the axes {', '.join(MESH_AXES)}, got {axis!r}" for axis in mesh if axis not in MESH_AXES]
    for axis, size in mesh.items():
        if axis in MESH_AXES and size != -1 and size < 1:
            found.append(f"mesh.{axis} must be -1 (all remaining devices) or at least 1, got {size}")
    free = [axis for axis, size in mesh.items() if size == -1]
    if len(free) > 1:
        found.append(f"mesh may leave one axis at -1, got {' and '.join(free)}")
    if mesh.get("tensor", 1) != 1:
        found.append(f"mesh.tensor must be 1: tensor parallelism is not available, got {mesh['tensor']}")
    return found
