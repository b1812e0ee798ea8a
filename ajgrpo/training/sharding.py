"""Where parameters and batches live on the device mesh, and how a layer is gathered when it is needed.

FSDP in the style of ``shard_map``: every parameter is split along one axis over the mesh axis ``fsdp`` and copied over
``data``; each device forwards a row of its own. A layer's weights are cast to the compute dtype and gathered just
before use; the transpose of that gather is a reduce-scatter of the gradients, done in float32.

    device (d, f):  row d·F + f of the batch,  shard f of every parameter

Model files name their parameters' axes logically; this module alone maps those names to the mesh.
Left out: tensor parallelism, and meshes over several hosts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ajgrpo.errors import ConfigError

ROW_AXES = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are split: all of them."""

SHARD_PREFERENCE = ("vocab", "mlp", "heads", "kv", "embed")
"""Logical axes in the order in which they are considered for the split over ``fsdp``."""

Params = Any
"""A pytree (nested dicts) of arrays, or of their shapes or specs."""


def make_mesh(sizes: Mapping[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh with axes ``data`` and ``fsdp``.

    Args:
        sizes: ``AsyncGRPOConfig.mesh``; a missing axis has size 1, and one axis may be -1 (the remaining devices).
        devices: default all of the process's devices. A mesh smaller than that uses the first ones.

    Raises:
        ConfigError: the sizes do not fit the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [sizes.get(axis, 1) for axis in ROW_AXES]
    known = math.prod(size for size in shape if size != -1)
    if known > len(devices) or (-1 in shape and len(devices) % known):
        raise ConfigError(f"mesh={dict(sizes)} does not fit the {len(devices)} available devices")
    shape = [len(devices) // known if size == -1 else size for size in shape]
    grid = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, ROW_AXES, axis_types=(AxisType.Auto,) * len(ROW_AXES))


def shard_axis(shape: tuple[int, ...], logical_axes: tuple[str | None, ...], num_shards: int) -> int | None:
    """Which axis of a parameter is split over ``fsdp``; None: every device holds it whole (nothing divides)."""
    for name in SHARD_PREFERENCE:
        for axis, (size, logical) in enumerate(zip(shape, logical_axes, strict=True)):
            if logical == name and size % num_shards == 0:
                return axis
    return None


def param_axes(shapes: Params, logical_axes: Params, mesh: Mesh) -> Params:
    """For each parameter the axis that is split over ``fsdp``; -1 where none is (None would vanish from a pytree)."""

    def choose(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> int:
        axis = shard_axis(leaf.shape, axes, mesh.shape["fsdp"])
        return -1 if axis is None else axis

    return jax.tree.map(choose, shapes, logical_axes)


def partition_spec(axis: int) -> PartitionSpec:
    """The spec that splits axis ``axis`` over ``fsdp``; -1: nothing is split."""
    return PartitionSpec() if axis < 0 else PartitionSpec(*[None] * axis, "fsdp")


def row_sharding(mesh: Mesh) -> NamedSharding:
    """How a batch lies on the mesh: its leading axis, one row per device."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(state: Any, params: Params, shardings: Params, mesh: Mesh) -> Any:
    """Shardings of an optimizer state: a leaf that mirrors a parameter (same path end, same shape) lies as it does.

    Args:
        state: pytree of ``ShapeDtypeStruct``, for example ``jax.eval_shape(optimizer.init, params)``.
        params: pytree of ``ShapeDtypeStruct``.
        shardings: the parameters' shardings.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    by_path = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(flat, jax.tree.leaves(shardings), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for start in range(len(path)):
            shape, sharding = by_path.get(jax.tree_util.keystr(path[start:]), (None, None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(shard: jax.Array, axis: int, dtype: str) -> jax.Array:
    """The whole parameter in the compute dtype, from this device's shard. For use inside ``shard_map``.

    The gradient is summed over ``fsdp`` in float32 and comes back split like the shard (``axis`` ≥ 0) or, for a
    parameter that every device holds whole (``axis`` = -1), local and *not* summed: see ``sum_gradients``.

    Args:
        shard: this device's part.
        axis: the split axis, -1 where nothing is split.
        dtype: compute dtype.
    """
    whole = shard.astype(dtype)
    return whole if axis < 0 else lax.all_gather(whole, "fsdp", axis=axis, tiled=True)


def _gather_forward(shard: jax.Array, axis: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    return gather(shard, axis, dtype), jnp.zeros((), shard.dtype)


def _gather_backward(axis: int, dtype: str, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(jnp.float32)
    if axis >= 0:
        gradient = lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True)
    return (gradient.astype(like.dtype),)


gather.defvjp(_gather_forward, _gather_backward)


def sum_gradients(gradients: Params, axes: Params) -> Params:
    """Sums the devices' gradients where ``gather`` has not: over ``data``, and over ``fsdp`` for unsplit parameters."""
    return jax.tree.map(lambda g, axis: lax.psum(g, ROW_AXES if axis < 0 else "data"), gradients, axes)


class Unshard:
    """Gathers the parts of the model that the decoder asks for, each whole part once per trace.

    Inside the scan over layers the decoder passes one layer's slice, so a stacked parameter's axis counts from 1.

    Args:
        axes: see ``param_axes``.
        dtype: compute dtype.
    """

    def __init__(self, axes: Mapping[str, Params], dtype: str):
        self._axes, self._dtype = axes, dtype
        self._whole: dict[str, Params] = {}

    def __call__(self, name: str, part: Params) -> Params:
        if name == "block":
            return jax.tree.map(lambda leaf, axis: gather(leaf, max(axis - 1, -1), self._dtype), part, self._axes[name])
        if name not in self._whole:
            self._whole[name] = jax.tree.map(lambda leaf, axis: gather(leaf, axis, self._dtype), part, self._axes[name])
        return self._whole[name]
