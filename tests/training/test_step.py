"""The train step: a packed row trains exactly like its samples alone, however they are split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.losses.builder import build_loss
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import init_params
from ajgrpo.packing.batch import build_batch
from ajgrpo.packing.planner import MicroBatchPlanner, Row
from ajgrpo.training.sharding import make_mesh
from ajgrpo.training.step import StepSettings, TrainState, TrainStep, observations
from ajgrpo.types import RolloutSample
from tests.helpers import random_samples

SIZE = 128
VOCAB = 48
TOP_K = 3
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "head_dim": 8},
}
# Float32 sums in another order: gradients of these sizes agree to a few 1e-6 of the largest entry.
TOLERANCE = 1e-5


@functools.cache
def make_config(family: str = "qwen3") -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **FAMILIES[family]})


@functools.cache
def make_step(family: str = "qwen3", devices: int = 1, loss: str = "score_centering", **settings: Any) -> TrainStep:
    """Steps are shared between tests: each compiles its programs once."""
    window = {"vllm_importance_sampling_clip_min": 0.01, "vllm_importance_sampling_clip_max": 100.0}
    options = AsyncGRPOConfig(loss=loss, **window)
    chosen = StepSettings(**{"compute_dtype": "float32", "num_sampler_logprobs": TOP_K, "temperature": 0.8} | settings)
    mesh = make_mesh({"data": 1 if devices < 4 else 2, "fsdp": -1}, jax.devices()[:devices])
    return TrainStep(make_config(family), mesh, build_loss(options), optax.sgd(1.0), chosen)


@functools.cache
def log_prob_program(step: TrainStep) -> Any:
    """(params, batch of one row) -> log-probs of its terms."""
    spec = jax.sharding.PartitionSpec()
    return jax.jit(
        jax.shard_map(
            lambda p, b: step.row_log_probs(p, jax.tree.map(lambda leaf: leaf[0], b))[0],
            mesh=step.mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            check_vma=False,
        )
    )


@functools.cache
def make_params(family: str = "qwen3") -> Any:
    """Random everywhere: biases and norms that are 0 and 1 would hide errors."""
    params = init_params(make_config(family), jax.random.key(0), "float32")
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def fresh_state(step: TrainStep) -> TrainState:
    """A state of its own copy of the parameters: ``apply`` takes its buffers."""
    return step.init_state(jax.device_put(jax.tree.map(np.array, make_params()), step.param_shardings))


def one_row(samples: list[RolloutSample]) -> list[Row]:
    row = Row(SIZE)
    for sample in samples:
        row.add(sample)
    return [row]


def run(step: TrainStep, params: Any, micro_batches: list[list[Row]], size: int = SIZE, pad: int = 0) -> Any:
    """Summed gradients (NumPy) and the metrics of each micro-batch."""
    gradients = step.zero_gradients()
    placed = jax.device_put(params, step.param_shardings)
    metrics = []
    for rows in micro_batches:
        batch = build_batch(rows, size, num_sampler_logprobs=TOP_K, num_candidates=0, pad_token_id=pad)
        gradients, observed = step.accumulate(placed, gradients, batch, version=0)
        metrics.append({item.name: item for item in observations(observed)})
    return jax.tree.map(np.asarray, gradients), metrics


def log_probs(step: TrainStep, params: Any, rows: list[Row], size: int = SIZE, pad: int = 0) -> np.ndarray:
    """Log-probs of the terms of a single row."""
    batch = build_batch(rows, size, num_sampler_logprobs=TOP_K, num_candidates=0, pad_token_id=pad)
    return np.asarray(log_prob_program(step)(params, batch))[: rows[0].num_terms]


def assert_close(actual: Any, expected: Any) -> None:
    for (path, a), e in zip(jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.abs(e).max()))
        np.testing.assert_allclose(a, e, rtol=0, atol=TOLERANCE * scale, err_msg=jax.tree_util.keystr(path))


def sample_sets() -> dict[str, list[RolloutSample]]:
    rng = np.random.default_rng(7)
    small = {"num_groups": 2, "group_size": 3, "max_prompt": 6, "max_completion": 8, "vocab_size": VOCAB}
    forks = random_samples(rng, **small)
    nothing_shared = random_samples(rng, **small, share=False)
    duplicates = [dataclasses.replace(forks[0], advantage=advantage) for advantage in (1.0, -0.3, 2.0)]
    return {"shared prompts and forks": forks, "nothing shared": nothing_shared, "duplicates": duplicates}


@pytest.mark.parametrize("loss", ["score_centering", "clipped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_samples_alone(family: str, loss: str) -> None:
    step, params = make_step(family, loss=loss), make_params(family)
    for name, samples in sample_sets().items():
        packed, (metrics,) = run(step, params, [one_row(samples)])
        alone, parts = run(step, params, [one_row([sample]) for sample in samples])
        assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(alone)) > 0.1, name
        assert_close(packed, alone)
        for metric in ("loss", "entropy"):
            total = sum(part[metric].numerator for part in parts)
            assert metrics[metric].numerator == pytest.approx(total, abs=1e-4), (name, metric)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_packed_row_equal_those_alone(family: str) -> None:
    step, params = make_step(family), make_params(family)
    for samples in sample_sets().values():
        packed = log_probs(step, params, one_row(samples))
        alone = np.concatenate([log_probs(step, params, one_row([sample])) for sample in samples])
        np.testing.assert_allclose(packed, alone, rtol=0, atol=TOLERANCE)


def test_changing_a_sample_leaves_the_others_alone() -> None:
    step, params = make_step(), make_params()
    samples = sample_sets()["shared prompts and forks"]
    before = log_probs(step, params, one_row(samples))
    first = samples[0].num_trained
    for changed_token in (3, 40):
        changed = dataclasses.replace(samples[0], input_ids=samples[0].input_ids.copy())
        changed.input_ids[-1] = changed_token
        changed.input_ids[0] = VOCAB - 1
        after = log_probs(step, params, one_row([changed, *samples[1:]]))
        assert np.abs(after[:first] - before[:first]).max() > 1e-3
        np.testing.assert_allclose(after[first:], before[first:], rtol=0, atol=1e-6)


def test_padding_changes_nothing() -> None:
    step, params = make_step(), make_params()
    rows = one_row(sample_sets()["shared prompts and forks"])
    expected, _ = run(step, params, [rows])
    for size, pad in ((128, 5), (256, 0), (384, 47)):
        actual, _ = run(step, params, [rows], size=size, pad=pad)
        assert_close(actual, expected)


def plan(samples: list[RolloutSample], num_rows: int) -> list[Row]:
    planner = MicroBatchPlanner(num_rows, SIZE)
    for sample in samples:
        planner.add(sample)
    return planner.finish()


@pytest.mark.parametrize("loss", ["score_centering", "clipped"])
def test_splits_over_devices_and_micro_batches_change_nothing(loss: str) -> None:
    params, rng = make_params(), np.random.default_rng(3)
    samples = random_samples(rng, num_groups=4, group_size=4, vocab_size=VOCAB, max_prompt=3, max_completion=3)
    one = make_step(loss=loss)
    expected, metrics = run(one, params, [one_row(samples)])
    num_terms = sum(sample.num_trained for sample in samples)
    updated, norm = one.apply(fresh_state(one), expected, num_terms)
    for devices in (1, 4, 8):
        step = make_step(devices=devices, loss=loss)
        for parts in (1, 2):
            chunks = [samples[i::parts] for i in range(parts)]
            actual, observed = run(step, params, [plan(chunk, devices) for chunk in chunks])
            assert_close(actual, expected)
            loss_sum = sum(part["loss"].numerator for part in observed)
            assert loss_sum == pytest.approx(metrics[0]["loss"].numerator, abs=1e-4)
            assert sum(part["loss"].denominator for part in observed) == num_terms
            largest = "sampling/sampling_logp_difference/max"
            assert max(p[largest].numerator for p in observed) == pytest.approx(metrics[0][largest].numerator, abs=1e-5)
            state = fresh_state(step)
            state, actual_norm = step.apply(state, jax.device_put(actual, step.param_shardings), num_terms)
            assert float(actual_norm) == pytest.approx(float(norm), rel=1e-5)
            assert_close(jax.tree.map(np.asarray, state.params), jax.tree.map(np.asarray, updated.params))


def test_parameters_are_sharded() -> None:
    step = make_step(devices=8)  # data 2 × fsdp 4
    params = jax.device_put(make_params(), step.param_shardings)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert held < 0.3 * whole  # a quarter, and the few leaves that nothing divides
    state = fresh_state(step)
    assert int(state.step) == 0


def test_apply_divides_by_the_trained_tokens_and_counts_steps() -> None:
    step, params = make_step(), make_params()
    gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 6.0, jnp.float32), params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    before = jax.tree.map(np.asarray, params)
    state, norm = step.apply(fresh_state(step), gradients, 3)
    assert float(norm) == pytest.approx(2.0 * count**0.5, rel=1e-5)
    assert int(state.step) == 1
    assert_close(jax.tree.map(np.asarray, state.params), jax.tree.map(lambda leaf: leaf - 2.0, before))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    step, params = make_step(), make_params()
    before = jax.tree.map(np.asarray, params)
    gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, jnp.float32), params)
    state, norm = step.apply(fresh_state(step), gradients, 3)
    assert np.isnan(float(norm))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_in_bfloat16_keep_an_exact_optimizer() -> None:
    """Three updates of AdamW against float64, in which nothing but the parameters is rounded to bfloat16."""
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    settings = StepSettings(compute_dtype="float32", master_dtype="bfloat16", num_sampler_logprobs=TOP_K)
    step = TrainStep(make_config(), mesh, make_step().loss, optax.adamw(0.1, weight_decay=0.01), settings)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), make_params())
    tree = jax.tree.structure(params)
    expected = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    first, second = [np.zeros_like(leaf) for leaf in expected], [np.zeros_like(leaf) for leaf in expected]
    state = step.init_state(jax.device_put(params, step.param_shardings))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    rng = np.random.default_rng(0)
    for number in (1, 2, 3):
        gradients = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in expected]
        state, _ = step.apply(state, jax.device_put(jax.tree.unflatten(tree, gradients), step.param_shardings), 1)
        for i, gradient in enumerate(gradients):
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.999 * second[i] + 0.001 * np.square(gradient, dtype=np.float64)
            move = first[i] / (1 - 0.9**number) / (np.sqrt(second[i] / (1 - 0.999**number)) + 1e-8)
            updated = expected[i] - 0.1 * (move + 0.01 * expected[i])
            expected[i] = np.asarray(updated.astype(jnp.bfloat16), np.float64)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    actual = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(state.params)])
    reference = np.concatenate([leaf.ravel() for leaf in expected])
    # A float32 value at the middle between two bfloat16 numbers may round the other way; that is rare.
    assert (actual != reference).mean() < 0.005
    np.testing.assert_allclose(actual, reference, rtol=2**-7, atol=1e-3)


def test_remat_changes_nothing() -> None:
    params, rows = make_params(), one_row(sample_sets()["shared prompts and forks"])
    with_remat, _ = run(make_step(remat=True), params, [rows])
    without, _ = run(make_step(remat=False), params, [rows])
    assert_close(with_remat, without)


def test_bfloat16_gradients_stay_near_float32() -> None:
    params, rows = make_params(), one_row(sample_sets()["shared prompts and forks"])
    exact, _ = run(make_step(), params, [rows])
    rounded, _ = run(make_step(compute_dtype="bfloat16"), params, [rows])
    a, b = (np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (exact, rounded))
    # bfloat16 keeps 8 bits: a chain of two layers loses a few percent, a wrong cast far more.
    assert a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.98


def test_on_policy_difference_looks_at_the_current_version_only() -> None:
    step, params = make_step(), make_params()
    sample = sample_sets()["nothing shared"][0]
    rows = one_row([sample])
    exact = log_probs(step, params, rows)
    versions = np.zeros(sample.num_trained, np.int32)
    old = exact.copy()
    versions[0], old[0] = 1, exact[0] + 3.0  # the other policy's token is off by 3
    rows = one_row([dataclasses.replace(sample, old_log_probs=old, versions=versions)])
    _, (metrics,) = run(step, params, [rows])
    assert metrics["sampling/sampling_logp_difference/max"].numerator == pytest.approx(3.0, abs=1e-4)
    if sample.num_trained > 1:
        assert metrics["sampling/on_policy_logp_difference/max"].numerator < 1e-5


def test_a_token_outside_its_candidate_set_has_no_difference_to_measure() -> None:
    step, params = make_step(num_candidates=4), make_params()
    sample = sample_sets()["nothing shared"][0]
    targets = sample.input_ids[sample.trained_positions]
    candidates = (targets[:, None] + np.arange(4)) % VOCAB
    candidates[0] = (targets[0] + 1 + np.arange(4)) % VOCAB  # the first term's own token is missing
    sample = dataclasses.replace(sample, candidate_ids=candidates.astype(np.int32))
    batch = build_batch(one_row([sample]), SIZE, num_sampler_logprobs=TOP_K, num_candidates=4)
    gradients, observed = step.accumulate(
        jax.device_put(params, step.param_shardings), step.zero_gradients(), batch, version=0
    )
    metrics = {item.name: item for item in observations(observed)}
    assert metrics["sampling/sampling_logp_difference/mean"].denominator == sample.num_trained - 1
    assert np.isfinite(metrics["sampling/sampling_logp_difference/max"].numerator)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradients))


def test_one_program_for_each_bucket() -> None:
    step, params = make_step(temperature=1.0), make_params()
    step.compile((128, 256))
    assert step.compile_count == 2
    rows = one_row(sample_sets()["duplicates"])
    for size in (128, 256, 128):
        run(step, params, [rows], size=size)
    assert step.compile_count == 2
