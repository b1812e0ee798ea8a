import dataclasses
import math
import typing

import pytest

from ajgrpo.config import CHOICES, LEAST, POSITIVE, SECTIONS, AsyncGRPOConfig, option
from ajgrpo.errors import ConfigError

# The defaults that scripts written for other async GRPO trainers rely on.
DEFAULTS = {
    "dtype": "float32", "bf16": True, "num_generations": 8, "max_completion_length": 2048, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
    "vllm_server_base_url": "http://localhost:8000", "vllm_server_timeout": 1800.0, "epsilon": 0.2,
    "epsilon_high": None, "score_centering": True, "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0, "num_sampler_logprobs": 8, "token_budget": None,
    "max_concurrent_rollouts": 512, "max_staleness": 4, "weight_sync_steps": 1, "rollout_worker_timeout": 300.0,
    "num_train_epochs": 3.0, "max_steps": -1, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
    "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "seed": 42, "logging_steps": 1, "report_to": [],
    "log_completions": False, "save_strategy": "steps", "save_steps": 500, "save_only_model": False,
    "gradient_checkpointing": True, "trust_remote_code": False, "router_aux_loss_coef": None,
}  # fmt: skip

INVALID = [
    (dict(dtype="int8"), "dtype must be one of auto, bfloat16, float16, float32, got 'int8'"),
    (dict(num_generations=1), "num_generations must be at least 2, got 1"),
    (dict(temperature=0.0), "temperature must be above 0, got 0.0"),
    (dict(temperature=math.inf), "temperature must be above 0, got inf"),
    (dict(learning_rate=math.nan), "learning_rate must be at least 0, got nan"),
    (dict(top_p=0.9), "top_p=0.9 and min_p=None need top_k > 0"),
    (dict(min_p=0.1), "top_p=1.0 and min_p=0.1 need top_k > 0"),
    (dict(top_p=1.5, top_k=4), "top_p must be in (0, 1], got 1.5"),
    (dict(min_p=-0.1, top_k=4), "min_p must be in [0, 1], got -0.1"),
    (dict(repetition_penalty=1.1), "repetition_penalty must be 1.0, got 1.1"),
    (dict(max_steps=0), "max_steps must be -1 (unset) or above 0, got 0"),
    (dict(num_train_epochs=0), "num_train_epochs must be above 0 when max_steps is unset, got 0"),
    (dict(lr_scheduler_type="cosine"), "lr_scheduler_type='cosine' needs max_steps"),
    (dict(optim="adam", weight_decay=0.1), "weight_decay must be 0 with optim='adam', which has none, got 0.1"),
    (dict(optim="sgd", weight_decay=0.1), "weight_decay must be 0 with optim='sgd', which has none, got 0.1"),
    (
        dict(lr_scheduler_type="linear", max_steps=5, warmup_steps=5),
        "warmup_steps must be below max_steps, got 5 and 5",
    ),
    (dict(adam_beta1=1.0), "adam_beta1 must be in [0, 1), got 1.0"),
    (dict(vllm_importance_sampling_clip_min=6.0), "must not exceed vllm_importance_sampling_clip_max, got 6.0 and 5.0"),
    (dict(num_sampler_logprobs=0), "score_centering=True needs num_sampler_logprobs of at least 1"),
    (dict(vllm_server_base_url="localhost:8000"), "must be 'embedded' or start with http:// or https://, got 'localh"),
    (
        dict(token_budget=8, max_completion_length=8),
        "token_budget must be above max_completion_length, got 8 and 8",
    ),
    (dict(push_to_hub=True), "push_to_hub=True needs hub_model_id"),
    (dict(report_to=["mlflow"]), "report_to may hold tensorboard, wandb, trackio, got 'mlflow'"),
    (dict(report_to=[3]), "an entry of report_to must be str, got 3 (int)"),
    (dict(output_dir=""), "output_dir must not be empty"),
    (dict(mesh={"rows": 2}), "mesh has the axes data, fsdp, tensor, got 'rows'"),
    (dict(mesh={"fsdp": 0}), "mesh.fsdp must be -1 (all remaining devices) or at least 1, got 0"),
    (dict(mesh={"fsdp": "2"}), "an entry of mesh must be int, got '2' (str)"),
    (dict(mesh={"data": -1, "fsdp": -1}), "mesh may leave one axis at -1, got data and fsdp"),
    (dict(mesh={"tensor": 2}), "mesh.tensor must be 1"),
    (dict(max_steps="10"), "max_steps must be int, got '10' (str)"),
    (dict(max_steps=True), "max_steps must be int, got True (bool)"),
    (dict(bf16=1), "bf16 must be bool, got 1 (int)"),
    (dict(token_budget=1.5), "token_budget must be int or None, got 1.5 (float)"),
]


def test_defaults():
    config = AsyncGRPOConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(("options", "message"), INVALID, ids=lambda value: str(value)[:40])
def test_an_invalid_value_is_refused_with_its_rule(options, message):
    with pytest.raises(ConfigError) as caught:
        AsyncGRPOConfig(**options)
    assert len(caught.value.violations) == 1
    assert message in caught.value.violations[0]


def test_all_violations_are_reported_together_also_beside_a_wrong_type():
    with pytest.raises(ConfigError) as caught:
        AsyncGRPOConfig(top_p=0.0, seed=-1, max_steps="ten", epsilon=None)
    assert caught.value.violations == (
        "epsilon must be float, got None (NoneType)",
        "max_steps must be int, got 'ten' (str)",
        "seed must be at least 0, got -1",
        "top_p must be in (0, 1], got 0.0",
    )


@pytest.mark.parametrize("name", [*LEAST, *POSITIVE])
def test_every_bounded_field_refuses_what_lies_below(name):
    below = LEAST[name] - 1 if name in LEAST else 0
    with pytest.raises(ConfigError, match=f"{name} must be (at least|above)"):
        AsyncGRPOConfig(**{name: below})


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_accepted_and_others_are_not(name):
    for value in CHOICES[name]:
        assert getattr(AsyncGRPOConfig(**{name: value}, max_steps=5), name) == value
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        AsyncGRPOConfig(**{name: "other"})


@pytest.mark.parametrize(
    ("options", "dtype"),
    [(dict(), "bfloat16"), (dict(bf16=False), "float32"), (dict(fp16=True), "float16"), (dict(bf16=True), "bfloat16")],
)
def test_compute_dtype(options, dtype):
    assert AsyncGRPOConfig(**options).compute_dtype == dtype


@pytest.mark.parametrize(
    ("options", "truncates"),
    [(dict(), False), (dict(top_k=5), True), (dict(top_k=5, top_p=0.9), True), (dict(min_p=0.0), False)],
)
def test_truncates_sampling(options, truncates):
    assert AsyncGRPOConfig(**options).truncates_sampling is truncates


def test_derived_bounds():
    assert AsyncGRPOConfig(epsilon=0.1).upper_epsilon == 0.1
    assert AsyncGRPOConfig(epsilon=0.1, epsilon_high=0.3).upper_epsilon == 0.3
    assert AsyncGRPOConfig(max_staleness=0).allowed_staleness == 1
    assert AsyncGRPOConfig(max_staleness=3).allowed_staleness == 3


@pytest.mark.parametrize(("given", "held"), [("none", []), ("wandb", ["wandb"]), (["trackio"], ["trackio"])])
def test_report_to_may_be_one_name(given, held):
    assert AsyncGRPOConfig(report_to=given).report_to == held


def test_defaults_are_not_shared_between_instances():
    AsyncGRPOConfig().mesh["fsdp"] = 4
    assert AsyncGRPOConfig().mesh == {"data": 1, "fsdp": -1}


def test_a_subclass_adds_options_and_rules():
    @dataclasses.dataclass(kw_only=True)
    class Curriculum(AsyncGRPOConfig):
        stages: int = option(3, "Stages.")

        def violations(self) -> list[str]:
            return [*super().violations(), *([] if self.stages > 0 else ["stages must be above 0"])]

    assert Curriculum(stages=2, seed=1).stages == 2
    with pytest.raises(ConfigError) as caught:
        Curriculum(stages=0, seed=-1)
    assert caught.value.violations == ("seed must be at least 0, got -1", "stages must be above 0")


def test_every_field_has_a_help_text_and_every_table_names_fields():
    fields = {field.name: field for field in dataclasses.fields(AsyncGRPOConfig)}
    assert all(field.metadata["help"].endswith(".") for field in fields.values())
    assert set(CHOICES) | set(LEAST) | set(POSITIVE) | set(SECTIONS) <= set(fields)
    assert next(iter(fields)) == next(iter(SECTIONS))
    assert set(typing.get_type_hints(AsyncGRPOConfig)) == set(fields)
