"""The functional surface: parameter trees, remat, unsharding, windows, and caches through ``layer_state``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import (
    Params,
    abstract_params,
    forward,
    head_kernel,
    init_params,
    param_logical_axes,
)
from tests.models.reference import causal_attend, dense_attention, model_config, sequence_logits

CONFIG = model_config("qwen3", num_hidden_layers=3, tie_word_embeddings=True)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, 9), jnp.int32)


def drawn_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Random parameters, large enough that every part shows in the logits."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(center + 0.3 * rng.standard_normal(leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


@pytest.fixture(scope="module")
def params() -> Params:
    return drawn_params(CONFIG)


@pytest.fixture(scope="module")
def logits(params: Params) -> np.ndarray:
    return np.asarray(jax.jit(lambda params: sequence_logits(CONFIG, params, TOKENS))(params))


def test_shapes_and_axes_of_every_parameter() -> None:
    config = model_config("qwen3", attention_bias=True)
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config, "bfloat16"))
    axes = param_logical_axes(config)
    attention = dict(
        query=dict(kernel=(2, 24, 32), bias=(2, 32)),
        key=dict(kernel=(2, 24, 16), bias=(2, 16)),
        value=dict(kernel=(2, 24, 16), bias=(2, 16)),
        output=dict(kernel=(2, 32, 24), bias=(2, 24)),
        query_norm=dict(scale=(2, 8)),
        key_norm=dict(scale=(2, 8)),
    )
    mlp = dict(gate=dict(kernel=(2, 24, 40)), up=dict(kernel=(2, 24, 40)), down=dict(kernel=(2, 40, 24)))
    block = dict(attention_norm=dict(scale=(2, 24)), attention=attention, mlp_norm=dict(scale=(2, 24)), mlp=mlp)
    assert shapes == dict(
        embed=dict(embedding=(50, 24)), block=block, final=dict(scale=(24,)), head=dict(kernel=(50, 24))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(config, "bfloat16"))} == {jnp.dtype("bfloat16")}
    assert axes["embed"]["embedding"] == axes["head"]["kernel"] == ("vocab", "embed")
    assert axes["block"]["attention"]["query"] == dict(kernel=("layers", "embed", "heads"), bias=("layers", "heads"))
    assert axes["block"]["attention"]["value"] == dict(kernel=("layers", "embed", "kv"), bias=("layers", "kv"))
    assert axes["block"]["attention"]["key_norm"]["scale"] == ("layers", None)
    assert axes["block"]["mlp"]["down"]["kernel"] == ("layers", "mlp", "embed")
    assert axes["final"]["scale"] == ("embed",)
    sizes = dict(layers=2, vocab=50, embed=24, heads=32, kv=16, mlp=40) | {None: 8}
    flat_axes = jax.tree.map(lambda leaf, names: tuple(sizes[name] for name in names), abstract_params(config), axes)
    assert flat_axes == shapes


def test_initial_parameters() -> None:
    config = model_config("qwen3", vocab_size=4000, attention_bias=True)
    params = init_params(config, jax.random.key(0), "float32")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(config)
    )
    assert float(jnp.std(params["embed"]["embedding"])) == pytest.approx(0.02, rel=0.02)
    attention = params["block"]["attention"]
    np.testing.assert_array_equal(params["final"]["scale"], 1.0)
    np.testing.assert_array_equal(attention["key_norm"]["scale"], 1.0)
    np.testing.assert_array_equal(attention["query"]["bias"], 0.0)
    assert not np.array_equal(attention["query"]["kernel"][0], attention["query"]["kernel"][1])
    assert not np.array_equal(params["embed"]["embedding"], params["head"]["kernel"])
    again = init_params(config, jax.random.key(0), "bfloat16")
    np.testing.assert_array_equal(
        again["embed"]["embedding"], params["embed"]["embedding"].astype("bfloat16"), strict=True
    )


def test_the_head_of_tied_weights_is_the_embedding(params: Params) -> None:
    assert "head" not in params
    assert head_kernel(CONFIG, params) is params["embed"]["embedding"]
    untied = model_config("qwen3")
    tree = drawn_params(untied)
    assert head_kernel(untied, tree) is tree["head"]["kernel"]
    asked = []

    def unshard(part: str, tree: Params) -> Params:
        asked.append(part)
        return jax.tree.map(lambda leaf: leaf + 1, tree)

    np.testing.assert_array_equal(head_kernel(CONFIG, params, unshard), params["embed"]["embedding"] + 1)
    np.testing.assert_array_equal(head_kernel(untied, tree, unshard), tree["head"]["kernel"] + 1)
    assert asked == ["embed", "head"]


def test_remat_changes_no_gradient_and_saves_no_gathered_weight(params: Params) -> None:
    def unshard(part: str, tree: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)

    def loss(params: Params, remat: bool, **options: Any) -> jax.Array:
        return jnp.square(sequence_logits(CONFIG, params, TOKENS, remat=remat, **options)).sum()

    plain, remat = (jax.jit(jax.grad(lambda p, r=r: loss(p, r)))(params) for r in (False, True))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(one).max()))

    def saved_weights(remat: bool) -> int:
        options = dict(compute_dtype="float16", unshard=unshard)
        _, pullback = jax.vjp(lambda p: loss(p, remat, **options), params)
        gathered = (3, CONFIG.hidden_size, CONFIG.intermediate_size)
        return sum(leaf.shape == gathered and leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(pullback))

    assert saved_weights(remat=False) > 0
    assert saved_weights(remat=True) == 0


def test_the_program_does_not_grow_with_depth() -> None:
    def lines(layers: int) -> int:
        config = model_config("qwen3", num_hidden_layers=layers)
        grad = jax.grad(lambda params: sequence_logits(config, params, TOKENS, remat=True).sum())
        return len(jax.jit(grad).lower(abstract_params(config)).as_text().splitlines())

    assert lines(2) == lines(12)


def test_unshard_is_asked_for_each_part_with_its_subtree(params: Params) -> None:
    seen: list[tuple[str, Any]] = []

    def unshard(part: str, tree: Params) -> Params:
        seen.append((part, jax.tree.map(jnp.shape, tree)))
        return tree

    jax.eval_shape(lambda p: sequence_logits(CONFIG, p, TOKENS, unshard=unshard), params)
    layer = jax.tree.map(lambda leaf: leaf.shape[1:], params["block"])
    shapes = jax.tree.map(jnp.shape, params)
    assert dict(seen) == dict(embed=shapes["embed"], block=layer, final=shapes["final"])


def test_bfloat16_compute_stays_close_to_float32(params: Params, logits: np.ndarray) -> None:
    rough = jax.jit(lambda params: sequence_logits(CONFIG, params, TOKENS, compute_dtype="bfloat16"))(params)
    assert rough.dtype == jnp.bfloat16
    error = np.abs(np.asarray(rough, np.float32) - logits)
    assert 0 < error.max() < 0.1 * np.abs(logits).max()
    assert np.sqrt((error**2).mean()) < 0.02 * logits.std()


def test_embedding_gradients_of_a_repeated_token_are_summed_in_the_master_dtype() -> None:
    tokens = jnp.full(600, 7, jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros_like(q), state

    config = model_config(num_hidden_layers=1)
    params = drawn_params(config)
    params["block"] = jax.tree.map(jnp.zeros_like, params["block"])

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        hidden, _ = forward(config, params, tokens, jnp.zeros_like(tokens), attend, compute_dtype="bfloat16")
        return hidden[:, 0].astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))
    one, many = (gradient(params, t)["embed"]["embedding"][7] for t in (tokens[:1], tokens))
    # Added up in bfloat16, the sum would stall at 256 times one gradient.
    np.testing.assert_allclose(many, 600 * one, rtol=1e-3)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [((0, 0, 0), None), ((4, 4, 4), 4), ((0, 4, 2), "traced")],
)
def test_windows_reach_attend(windows: tuple[int, ...], expected: Any, params: Params) -> None:
    config = dataclasses.replace(CONFIG, layer_windows=windows)
    seen = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
        seen.append(window)
        return q, window

    _, state = forward(config, params, TOKENS, jnp.arange(9), attend)
    if expected == "traced":
        assert seen[0].dtype == jnp.int32 and seen[0].shape == ()
        np.testing.assert_array_equal(state, windows)
    else:
        assert seen == [expected]


def test_prefill_and_decoding_slot_by_slot_give_the_logits_of_whole_sequences(params: Params) -> None:
    """Two requests of different length share a cache; prompts of 3 and 5 tokens are prefilled, the rest decoded."""
    rng = np.random.default_rng(1)
    sequences = [jnp.asarray(rng.integers(0, CONFIG.vocab_size, length), jnp.int32) for length in (7, 9)]
    prompts, room = (3, 5), 10

    def keep_keys(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
        return causal_attend(CONFIG)(q, k, v, window, None)[0], (k, v)

    shape = (CONFIG.num_layers, 2, room, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache = (jnp.zeros(shape), jnp.zeros(shape))
    for slot, (sequence, length) in enumerate(zip(sequences, prompts, strict=True)):
        _, keys = forward(CONFIG, params, sequence[:length], jnp.arange(length), keep_keys)
        cache = jax.tree.map(lambda old, new, s=slot, n=length: old.at[:, s, :n].set(new), cache, keys)

    @jax.jit
    def decode(cache: Any, tokens_B: jax.Array, positions_B: jax.Array) -> tuple[jax.Array, Any]:
        slots = jnp.arange(2)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
            keys, values = (c.at[slots, positions_B].set(new) for c, new in zip(state, (k, v), strict=True))
            seen = jnp.arange(room)[None, None, :] <= positions_B[:, None, None]
            dense = jax.vmap(functools.partial(dense_attention, scale=CONFIG.attention_scale))
            return dense(q[:, None], keys, values, seen)[:, 0], (keys, values)

        hidden, cache = forward(CONFIG, params, tokens_B, positions_B, attend, layer_state=cache)
        return hidden @ head_kernel(CONFIG, params).T, cache

    expected = [np.asarray(sequence_logits(CONFIG, params, sequence)) for sequence in sequences]
    for step in range(4):
        positions = [length + step for length in prompts]
        tokens = jnp.stack([sequence[p] for sequence, p in zip(sequences, positions, strict=True)])
        logits, cache = decode(cache, tokens, jnp.asarray(positions))
        for slot, position in enumerate(positions):
            np.testing.assert_allclose(logits[slot], expected[slot][position], rtol=1e-4, atol=1e-4)


def test_gathering_shards_inside_shard_map_changes_nothing(params: Params, logits: np.ndarray) -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = jax.tree.map(lambda leaf: PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp"), params)

    def gather(part: str, tree: Params) -> Params:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "fsdp", axis=leaf.ndim - 1, tiled=True), tree)

    def row(params: Params, tokens: jax.Array) -> jax.Array:
        hidden, _ = forward(CONFIG, params, tokens[0], jnp.arange(9), causal_attend(CONFIG), unshard=gather, remat=True)
        return (hidden @ head_kernel(CONFIG, params, gather).T)[None]

    program = jax.shard_map(
        row, mesh=mesh, in_specs=(specs, PartitionSpec("fsdp")), out_specs=PartitionSpec("fsdp"), check_vma=False
    )
    rows = jax.jit(program)(params, jnp.stack([TOKENS, TOKENS[::-1]]))
    np.testing.assert_allclose(rows[0], logits, rtol=1e-4, atol=1e-4)
