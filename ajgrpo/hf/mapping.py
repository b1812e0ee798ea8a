"""Checkpoint names, and the invertible maps between checkpoint tensors and the decoder's parameters.

The only module that knows names such as ``model.layers.0.mlp.up_proj.weight``. Loading, saving and weight pushes all
walk the same table, forwards or backwards, so what one writes the others read:

    checkpoint tensor ──op.load──▶ leaf, or leaf[layer] of a stacked one
                      ◀──op.save──

Left out: reading and writing files (``io``); tensors of one checkpoint in different dtypes (all are cast to one).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from ajgrpo.errors import CheckpointError, KeyMismatchError
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import Params, abstract_params
from ajgrpo.weights.base import TensorSpec

Path = tuple[str, ...]
"""Where a leaf sits in the parameter tree. Example: ``("block", "mlp", "up", "kernel")``."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An invertible map: ``load`` from checkpoint layout to ours, ``save`` back. Works on NumPy and JAX arrays."""

    load: Callable[[Any], Any]
    save: Callable[[Any], Any]


COPY = Op(load=lambda array: array, save=lambda array: array)
TRANSPOSE = Op(load=lambda array: array.T, save=lambda array: array.T)
"""Checkpoints keep the kernel of a linear layer as [out, in], the decoder as [in, out]."""


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One line of a family's table.

    Attributes:
        name: the tensor's name; ``{layer}`` in it stands for the layer, and then the leaf is stacked over layers.
        path: the leaf. A rule whose leaf a configuration lacks (a bias, say) does not apply to it.
        op: the map between the two.
    """

    name: str
    path: Path
    op: Op = COPY


def _linear(name: str, *path: str) -> tuple[TensorRule, TensorRule]:
    name = "model.layers.{layer}." + name
    return (
        TensorRule(f"{name}.weight", ("block", *path, "kernel"), TRANSPOSE),
        TensorRule(f"{name}.bias", ("block", *path, "bias")),
    )


EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

LLAMA = (
    TensorRule(EMBEDDING_NAME, ("embed", "embedding")),
    TensorRule("model.layers.{layer}.input_layernorm.weight", ("block", "attention_norm", "scale")),
    *_linear("self_attn.q_proj", "attention", "query"),
    *_linear("self_attn.k_proj", "attention", "key"),
    *_linear("self_attn.v_proj", "attention", "value"),
    *_linear("self_attn.o_proj", "attention", "output"),
    TensorRule("model.layers.{layer}.self_attn.q_norm.weight", ("block", "attention", "query_norm", "scale")),
    TensorRule("model.layers.{layer}.self_attn.k_norm.weight", ("block", "attention", "key_norm", "scale")),
    TensorRule("model.layers.{layer}.post_attention_layernorm.weight", ("block", "mlp_norm", "scale")),
    *_linear("mlp.gate_proj", "mlp", "gate"),
    *_linear("mlp.up_proj", "mlp", "up"),
    *_linear("mlp.down_proj", "mlp", "down"),
    TensorRule("model.norm.weight", ("final", "scale")),
    TensorRule(HEAD_NAME, ("head", "kernel")),
)

TABLES: Mapping[str, tuple[TensorRule, ...]] = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}
"""The table of each ``model_type``. Qwen 2 and 3 use Llama's names, with biases or norms besides."""

OBSOLETE_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and no model reads any more."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One checkpoint tensor and its place: the whole leaf at ``path``, or ``leaf[layer]`` of a stacked one.

    ``shape`` is the tensor's, as in the checkpoint.
    """

    name: str
    path: Path
    layer: int | None
    op: Op
    shape: tuple[int, ...]

    def fill(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Writes a checkpoint tensor into its place, cast to the leaf's dtype."""
        (leaf if self.layer is None else leaf[self.layer])[...] = self.op.load(tensor)

    def take(self, leaf: Any) -> Any:
        """The checkpoint tensor out of the leaf (a NumPy or JAX array)."""
        return self.op.save(leaf if self.layer is None else leaf[self.layer])


@functools.lru_cache(maxsize=32)
def checkpoint_slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Every tensor of the model's checkpoint, in the order of the manifest: embedding, layer by layer, norm, head."""
    shapes = flatten(abstract_params(config))
    rules = [rule for rule in TABLES[config.model_type] if rule.path in shapes]
    slots = []
    for stacked, group in itertools.groupby(rules, key=lambda rule: "{layer}" in rule.name):
        layers = range(config.num_layers) if stacked else (None,)
        for layer, rule in itertools.product(layers, list(group)):
            leaf = shapes[rule.path]
            part = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if stacked else leaf
            shape = jax.eval_shape(rule.op.save, part).shape
            slots.append(Slot(rule.name.format(layer=layer), rule.path, layer, rule.op, shape))
    return tuple(slots)


def leaf_slots(config: ModelConfig) -> dict[Path, list[Slot]]:
    """The tensors that make up each leaf."""
    leaves: dict[Path, list[Slot]] = {}
    for slot in checkpoint_slots(config):
        leaves.setdefault(slot.path, []).append(slot)
    return leaves


def checkpoint_manifest(config: ModelConfig, dtype: str | None = None) -> list[TensorSpec]:
    """Names, shapes and dtypes of the checkpoint; ``dtype`` None: the one that ``config.json`` states."""
    return [TensorSpec(slot.name, slot.shape, dtype or config.dtype) for slot in checkpoint_slots(config)]


def iter_checkpoint(
    config: ModelConfig, params: Params, dtype: str | None = None, on_host: bool = False
) -> Iterator[tuple[str, Any]]:
    """The checkpoint's tensors one at a time, in the order of the manifest.

    Args:
        config: the model.
        params: the parameter tree, of NumPy or JAX arrays; the tensors are of the same kind.
        dtype: cast to it; None: as in ``params``.
        on_host: JAX arrays come out as NumPy views that are not row-major; transposing them while they are copied is
            several times faster than letting XLA do it on a CPU.
    """
    leaves = flatten(params)
    for slot in checkpoint_slots(config):
        leaf = leaves[slot.path]
        wanted = leaf.dtype if dtype is None else np.dtype(dtype)
        if isinstance(leaf, jax.Array) and on_host and leaf.dtype == wanted and len(leaf.sharding.device_set) == 1:
            yield slot.name, slot.take(np.asarray(leaf))  # a view of the very same memory
        elif isinstance(leaf, jax.Array):
            part = _part(leaf, slot.layer, dtype=wanted)
            yield slot.name, slot.op.save(np.asarray(part) if on_host else part)
        else:
            yield slot.name, slot.take(leaf).astype(wanted, copy=False)


@functools.partial(jax.jit, static_argnames="dtype")
def _part(leaf: jax.Array, layer: int | None, dtype: np.dtype) -> jax.Array:
    """One layer of a leaf (None: all of it), cast; one program serves all layers."""
    return (leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)).astype(dtype)


def assemble(
    config: ModelConfig, named: Iterable[tuple[str, np.ndarray]], dtype: DTypeLike, source: str = "the stream"
) -> Params:
    """The parameter tree, as NumPy arrays, out of checkpoint tensors in any order.

    Args:
        config: the model.
        named: names and tensors; each tensor is copied before the next is taken.
        dtype: dtype of the leaves.
        source: where the tensors come from, for error messages.

    Raises:
        KeyMismatchError: missing, unexpected, repeated or misshaped tensors, all of them.
        CheckpointError: weights are tied, yet the stream holds a head that differs from the embedding.
    """
    slots = {slot.name: slot for slot in checkpoint_slots(config)}
    leaves = {path: new_leaf(config, path, dtype) for path in leaf_slots(config)}
    found: dict[str, tuple[int, ...]] = {}
    repeated, redundant_head = [], None
    for name, tensor in named:
        if name in found:
            repeated.append(f"{name} (repeated)")
        found[name] = tensor.shape
        slot = slots.get(name)
        if slot is not None and slot.shape == tensor.shape:
            slot.fill(leaves[slot.path], tensor)
        elif name == HEAD_NAME:
            redundant_head = tensor.astype(np.dtype(dtype))
    check_tensors(config, found, source, repeated)
    if redundant_head is not None:
        check_redundant_head(redundant_head, leaves["embed", "embedding"], source)
    return unflatten(leaves)


def check_tensors(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str, repeated: Iterable[str] = ()
) -> None:
    """Compares the names and shapes found with the model's.

    Tolerated: buffers that no model reads any more, and the head of a model whose weights are tied.

    Raises:
        KeyMismatchError: with everything that does not match.
    """
    expected = {slot.name: slot.shape for slot in checkpoint_slots(config)}
    tolerated = {name for name in found if name.endswith(OBSOLETE_SUFFIXES)}
    if config.tie_word_embeddings:
        tolerated.add(HEAD_NAME)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and name not in tolerated] + list(repeated)
    misshaped = [
        f"{name}: expected {shape}, found {tuple(found[name])}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if missing or unexpected or misshaped:
        raise KeyMismatchError(source, missing, unexpected, misshaped)


def check_redundant_head(head: np.ndarray, embedding: np.ndarray, source: str) -> None:
    """Raises CheckpointError if a tied model's stored head [V, H] is not its embedding: then one would be lost."""
    if not np.array_equal(head, embedding, equal_nan=True):
        raise CheckpointError(
            f"{source}: {HEAD_NAME} differs from {EMBEDDING_NAME}, but tie_word_embeddings is true; "
            "set it to false in config.json, or remove the tensor"
        )


def new_leaf(config: ModelConfig, path: Path, dtype: DTypeLike) -> np.ndarray:
    """An empty buffer for the leaf at ``path``."""
    return np.empty(flatten(abstract_params(config))[path].shape, np.dtype(dtype))


def flatten(tree: Params) -> dict[Path, Any]:
    """The leaves of nested dicts by their path."""
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        nested = flatten(value) if isinstance(value, dict) else {(): value}
        flat.update({(key, *rest): leaf for rest, leaf in nested.items()})
    return flat


def unflatten(leaves: Mapping[Path, Any]) -> Params:
    """The inverse of ``flatten``."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
