"""The tables: names, shapes and layout by value, round trips, and every way in which tensors may not match."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ajgrpo.errors import CheckpointError, KeyMismatchError
from ajgrpo.hf.mapping import (
    COPY,
    TABLES,
    TRANSPOSE,
    assemble,
    checkpoint_manifest,
    checkpoint_slots,
    flatten,
    iter_checkpoint,
    unflatten,
)
from ajgrpo.models.config import FAMILIES, ModelConfig
from ajgrpo.models.decoder import abstract_params
from ajgrpo.weights.base import TensorSpec
from tests.models.reference import model_config

EVERY_TENSOR = dict(attention_bias=True, mlp_bias=True)
CONFIG = model_config("qwen3", tie_word_embeddings=True)
UNTIED = model_config("llama", **EVERY_TENSOR)


def drawn_tensors(config: ModelConfig, dtype: Any = "float32") -> dict[str, np.ndarray]:
    """A random checkpoint."""
    rng = np.random.default_rng(0)
    return {spec.name: rng.standard_normal(spec.shape).astype(np.dtype(dtype)) for spec in checkpoint_manifest(config)}


def test_the_manifest_of_a_small_model() -> None:
    layer = (
        ("input_layernorm.weight", (24,)),
        ("self_attn.q_proj.weight", (32, 24)),
        ("self_attn.k_proj.weight", (16, 24)),
        ("self_attn.v_proj.weight", (16, 24)),
        ("self_attn.o_proj.weight", (24, 32)),
        ("self_attn.q_norm.weight", (8,)),
        ("self_attn.k_norm.weight", (8,)),
        ("post_attention_layernorm.weight", (24,)),
        ("mlp.gate_proj.weight", (40, 24)),
        ("mlp.up_proj.weight", (40, 24)),
        ("mlp.down_proj.weight", (24, 40)),
    )
    assert checkpoint_manifest(CONFIG, "bfloat16") == [
        TensorSpec("model.embed_tokens.weight", (50, 24), "bfloat16"),
        *(TensorSpec(f"model.layers.0.{name}", shape, "bfloat16") for name, shape in layer),
        *(TensorSpec(f"model.layers.1.{name}", shape, "bfloat16") for name, shape in layer),
        TensorSpec("model.norm.weight", (24,), "bfloat16"),
    ]
    assert checkpoint_manifest(UNTIED)[-1] == TensorSpec("lm_head.weight", (50, 24), "float32")
    biases = {spec.name: spec.shape for spec in checkpoint_manifest(UNTIED) if spec.name.endswith("bias")}
    assert len(biases) == 2 * 7
    assert biases["model.layers.1.mlp.down_proj.bias"] == (24,)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_every_leaf_of_every_family_is_covered_once(family: str, tied: bool, biases: bool) -> None:
    config = model_config(family, tie_word_embeddings=tied, attention_bias=biases, mlp_bias=biases)
    covered = [(slot.path, slot.layer) for slot in checkpoint_slots(config)]
    expected = []
    for path in flatten(abstract_params(config)):
        expected += [(path, layer) for layer in range(2)] if path[0] == "block" else [(path, None)]
    assert sorted(covered, key=str) == sorted(expected, key=str)


def test_a_kernel_is_the_transposed_weight_of_its_layer() -> None:
    tensors = drawn_tensors(CONFIG)
    params = assemble(CONFIG, tensors.items(), "float32")
    np.testing.assert_array_equal(
        params["block"]["mlp"]["up"]["kernel"][1], tensors["model.layers.1.mlp.up_proj.weight"].T
    )
    np.testing.assert_array_equal(
        params["block"]["attention"]["query_norm"]["scale"][0], tensors["model.layers.0.self_attn.q_norm.weight"]
    )
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_checkpoint_to_params_to_checkpoint_is_byte_equal(config: ModelConfig, dtype: Any) -> None:
    tensors = drawn_tensors(config, dtype)
    params = assemble(config, reversed(tensors.items()), dtype)
    back = list(iter_checkpoint(config, params))
    assert [name for name, _ in back] == list(tensors)
    for name, tensor in back:
        assert tensor.dtype == tensors[name].dtype
        assert tensor.tobytes() == tensors[name].tobytes(), name


@pytest.mark.parametrize(("on_host", "kind"), [(False, jax.Array), (True, np.ndarray)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_arrays_come_out_in_the_place_and_dtype_asked_for(on_host: bool, kind: type, dtype: str) -> None:
    tensors = drawn_tensors(CONFIG)
    params = jax.tree.map(jnp.asarray, assemble(CONFIG, tensors.items(), "float32"))
    manifest = checkpoint_manifest(CONFIG, dtype)
    for spec, (name, tensor) in zip(manifest, iter_checkpoint(CONFIG, params, dtype, on_host), strict=True):
        assert isinstance(tensor, kind)
        assert (spec.name, spec.shape, spec.dtype) == (name, tensor.shape, tensor.dtype.name)
        np.testing.assert_array_equal(np.asarray(tensor), tensors[name].astype(np.dtype(dtype)))


@pytest.mark.parametrize("op", [COPY, TRANSPOSE])
def test_ops_are_their_own_way_back(op: Any) -> None:
    array = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(op.save(op.load(array)), array)
    np.testing.assert_array_equal(op.load(op.save(array)), array)
    assert {rule.op for table in TABLES.values() for rule in table} == {COPY, TRANSPOSE}


def test_everything_that_does_not_match_is_raised_once() -> None:
    tensors = drawn_tensors(UNTIED)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.bias"]
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
    tensors |= {"lm_head.bias": np.zeros(50), "model.layers.2.mlp.up_proj.bias": np.zeros(40)}
    stream = [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])]
    with pytest.raises(KeyMismatchError, match="the tensors of here do not match") as caught:
        assemble(UNTIED, stream, "float32", "here")
    error = caught.value
    assert error.missing == ("model.layers.1.mlp.up_proj.bias", "model.norm.weight")
    assert error.unexpected == ("lm_head.bias", "model.layers.2.mlp.up_proj.bias", "lm_head.weight (repeated)")
    assert error.misshaped == ("model.layers.0.mlp.up_proj.weight: expected (40, 24), found (24, 40)",)
    for name in (*error.missing, *error.unexpected, *error.misshaped):
        assert name in str(error)


def test_an_untied_model_needs_its_head() -> None:
    tensors = drawn_tensors(UNTIED)
    del tensors["lm_head.weight"]
    with pytest.raises(KeyMismatchError, match=r"missing \(1\): lm_head.weight"):
        assemble(UNTIED, tensors.items(), "float32")


def test_a_tied_model_tolerates_its_embedding_stored_twice_and_obsolete_buffers() -> None:
    tensors = drawn_tensors(CONFIG)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4),
    }
    params = assemble(CONFIG, (extra | tensors).items(), "bfloat16")
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    )
    assert "head" not in params


def test_a_tied_model_with_a_head_of_its_own_is_refused() -> None:
    tensors = drawn_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(CheckpointError, match=re.escape("tie_word_embeddings is true; set it to false")):
        assemble(CONFIG, tensors.items(), "float32")


def test_flatten_and_unflatten() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {("a", "b"): 1, ("a", "c", "d"): 2, ("e",): 3}
    assert unflatten(flatten(tree)) == tree
