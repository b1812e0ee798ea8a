"""The train step: gradients of one micro-batch summed into an accumulator, then one optimizer update.

    TreeBatch ──▶ accumulate(params, gradients, batch)   once per micro-batch, one compiled program per bucket
                      │  decoder → tree attention → chunked head → loss, one row per device
                      ▼
                  apply(state, gradients, tokens)        once per step: ÷ trained tokens, clip, optimizer

Loss and gradients are sums over tokens until ``apply`` divides them by the step's number of trained tokens over all
micro-batches and ranks. So the result does not depend on how samples are spread over micro-batches or devices.

Both programs are compiled ahead of time for shapes known at start; nothing compiles in the middle of a run.
Left out: the mixture-of-experts auxiliary loss, loss scaling for float16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ajgrpo.losses.api import LossExtras, LossFn
from ajgrpo.metrics import Observation, reduction
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import abstract_params, forward, head_kernel, param_logical_axes
from ajgrpo.ops.attention import TreeMask, tree_attention
from ajgrpo.ops.logprobs import head_statistics
from ajgrpo.packing.batch import TreeBatch
from ajgrpo.training import sharding as shard

Params = Any
TracedBatch = Any
"""A ``TreeBatch`` of traced arrays; inside ``shard_map`` without its leading axis."""

jax.tree_util.register_dataclass(
    TreeBatch, data_fields=[field.name for field in dataclasses.fields(TreeBatch)], meta_fields=[]
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step updates: master parameters, optimizer state and the number of steps done (int32 scalar)."""

    params: Params
    opt_state: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What is compiled into the step.

    Attributes:
        compute_dtype: dtype of the forward and backward pass.
        master_dtype: dtype of the parameters that the optimizer updates.
        temperature: the sampler's.
        remat: recompute each layer in the backward pass.
        num_sampler_logprobs: K of the batches.
        num_candidates: C of the batches; 0 when sampling is not truncated.
        attention: implementation of tree attention.
    """

    compute_dtype: str = "bfloat16"
    master_dtype: str = "float32"
    temperature: float = 1.0
    remat: bool = True
    num_sampler_logprobs: int = 8
    num_candidates: int = 0
    attention: str = "auto"


class TrainStep:
    """The compiled programs of a run. Immutable apart from the cache of programs.

    Args:
        config: the model.
        mesh: see ``training.sharding.make_mesh``.
        loss: a loss on JAX arrays.
        optimizer: applied to the mean gradient over trained tokens.
        settings: see ``StepSettings``.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        settings: StepSettings,
    ):
        self.config, self.mesh, self.loss, self.optimizer, self.settings = config, mesh, loss, optimizer, settings
        self.num_rows = mesh.size
        self.param_shapes = abstract_params(config, settings.master_dtype)
        self._axes = shard.param_axes(self.param_shapes, param_logical_axes(config), mesh)
        self._specs = jax.tree.map(shard.partition_spec, self._axes)
        self.param_shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self._specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        opt_shapes = jax.eval_shape(self._init_optimizer, self.param_shapes)
        whole = shard.replicated(mesh)
        self.state_shardings = TrainState(
            params=self.param_shardings,
            opt_state=shard.state_shardings(opt_shapes, self.param_shapes, self.param_shardings, mesh),
            step=whole,
        )
        self.state_shapes = TrainState(self.param_shapes, opt_shapes, jax.ShapeDtypeStruct((), jnp.int32))
        self._accumulate_programs: dict[int, Any] = {}
        self._apply_program: Any = None
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.param_shapes),
            out_shardings=self.param_shardings,
        )

    @property
    def compile_count(self) -> int:
        """How many micro-batch programs have been compiled so far: one per bucket."""
        return len(self._accumulate_programs)

    def init_state(self, params: Params) -> TrainState:
        """The state of a fresh run. ``params``: arrays placed by ``param_shardings``."""
        init = jax.jit(self._init_optimizer, out_shardings=self.state_shardings.opt_state)
        step = jax.device_put(np.zeros((), np.int32), shard.replicated(self.mesh))
        return TrainState(params, init(params), step)

    def place(self, path: tuple[str, ...], leaf: np.ndarray) -> jax.Array:
        """Puts one parameter onto the mesh (for ``hf.io.load_params``)."""
        sharding: Any = self.param_shardings
        for key in path:
            sharding = sharding[key]
        return jax.device_put(leaf, sharding)

    def zero_gradients(self) -> Params:
        """A fresh accumulator: float32, shaped and placed like the parameters."""
        return self._zeros()

    def compile(self, sizes: tuple[int, ...]) -> None:
        """Compiles the programs for all bucket sizes and the update, as far as they are not yet."""
        for size in sizes:
            self._accumulate_program(size)
        if self._apply_program is None:
            self._apply_program = self._compile_apply()

    def accumulate(
        self, params: Params, gradients: Params, batch: TreeBatch, version: int
    ) -> tuple[Params, dict[str, jax.Array]]:
        """Adds a micro-batch's summed gradients to ``gradients`` (donated).

        Args:
            params: the state's parameters.
            gradients: the accumulator.
            batch: one row per device of the mesh.
            version: the policy version of ``params`` on the server, for the on-policy metric; -1 if not pushed.

        Returns:
            The accumulator, and for each metric the float32 pair (numerator, denominator) over all rows.
        """
        program = self._accumulate_program(batch.tokens.shape[1])
        placed = jax.device_put(batch, shard.row_sharding(self.mesh))
        return program(params, gradients, placed, jax.device_put(np.int32(version), shard.replicated(self.mesh)))

    def apply(self, state: TrainState, gradients: Params, num_tokens: int) -> tuple[TrainState, jax.Array]:
        """One optimizer update (``state`` is donated).

        Args:
            state: the state to update.
            gradients: sums over ``num_tokens`` trained tokens.
            num_tokens: the step's trained tokens over all micro-batches and rows.

        Returns:
            The new state, and the gradient's norm before clipping. A gradient that is not finite leaves parameters and
            optimizer state as they were.
        """
        if self._apply_program is None:
            self._apply_program = self._compile_apply()
        count = jax.device_put(np.float32(num_tokens), shard.replicated(self.mesh))
        return self._apply_program(state, gradients, count)

    def _accumulate_program(self, size: int) -> Any:
        if size not in self._accumulate_programs:
            mesh, rows = self.mesh, shard.row_sharding(self.mesh)
            whole = shard.replicated(mesh)
            batch = batch_shapes(self.num_rows, size, self.settings.num_sampler_logprobs, self.settings.num_candidates)
            program = jax.jit(
                jax.shard_map(
                    self._accumulate_row,
                    mesh=mesh,
                    in_specs=(self._specs, self._specs, PartitionSpec(shard.ROW_AXES), PartitionSpec()),
                    out_specs=(self._specs, PartitionSpec()),
                    check_vma=False,
                ),
                donate_argnums=(1,),
            )
            gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.param_shapes)
            arguments = (
                _placed(self.param_shapes, self.param_shardings),
                _placed(gradients, self.param_shardings),
                jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch),
                jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            )
            self._accumulate_programs[size] = program.lower(*arguments).compile()
        return self._accumulate_programs[size]

    def _compile_apply(self) -> Any:
        whole = shard.replicated(self.mesh)
        program = jax.jit(self._apply_update, donate_argnums=(0,), out_shardings=(self.state_shardings, whole))
        gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.param_shapes)
        arguments = (
            _placed(self.state_shapes, self.state_shardings),
            _placed(gradients, self.param_shardings),
            jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        )
        return program.lower(*arguments).compile()

    def _accumulate_row(
        self, params: Params, gradients: Params, batch: TracedBatch, version: jax.Array
    ) -> tuple[Params, dict[str, jax.Array]]:
        """Runs on each device with its row (leading axis 1) and its shards."""
        row = jax.tree.map(lambda leaf: leaf[0], batch)
        row_gradients, per_token = jax.grad(self._row_loss, has_aux=True)(params, row, version)
        row_gradients = shard.sum_gradients(row_gradients, self._axes)
        total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), gradients, row_gradients)
        return total, {name: reduce_rows(name, values, mask) for name, (values, mask) in per_token.items()}

    def _row_loss(
        self, params: Params, row: TracedBatch, version: jax.Array
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """The summed loss of one row, and each metric's values [M] with the mask of the terms that count for it."""
        log_probs, extras = self.row_log_probs(params, row)
        per_token, metrics = self.loss(log_probs, row.old_log_probs, row.advantages, extras)
        mask = row.term_mask
        # The inner where keeps a padded term's inf or nan out of the sum, and so out of the gradient.
        loss = jnp.where(mask, per_token, 0.0).sum()
        difference = jnp.abs(log_probs - row.old_log_probs)
        # A sampled token outside the candidate set has probability 0 here: the loss masks it, nothing to compare.
        compared = mask & jnp.isfinite(difference)
        values = {
            "loss": (per_token, mask),
            "entropy": (extras.entropy, mask),
            "sampling/sampling_logp_difference/mean": (difference, compared),
            "sampling/sampling_logp_difference/max": (difference, compared),
            "sampling/on_policy_logp_difference/max": (difference, compared & (row.term_versions == version)),
            **{name: (metric, mask) for name, metric in metrics.items()},
        }
        return loss, jax.tree.map(lax.stop_gradient, values)

    def row_log_probs(self, params: Params, row: TracedBatch) -> tuple[jax.Array, LossExtras]:
        """Log-probs of a row's targets [M] and what else the loss sees. Runs inside ``shard_map``."""
        settings, config = self.settings, self.config
        unshard = shard.Unshard(self._axes, settings.compute_dtype)
        mask = TreeMask(row.subtree_end, row.positions)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, layer_state: Any) -> tuple[jax.Array, Any]:
            output = tree_attention(
                q,
                k,
                v,
                mask,
                scale=config.attention_scale,
                window=window,
                softcap=config.attn_softcap,
                implementation=settings.attention,
            )
            return output, layer_state

        hidden, _ = forward(
            config,
            params,
            row.tokens,
            row.positions,
            attend,
            compute_dtype=settings.compute_dtype,
            remat=settings.remat,
            unshard=unshard,
        )
        log_probs, entropy = head_statistics(
            hidden[row.term_index],
            head_kernel(config, params, unshard),
            jnp.concatenate([row.targets[:, None], row.sampler_ids], axis=1),
            row.num_terms,
            temperature=settings.temperature,
            softcap=config.logit_softcap,
            candidate_ids=row.candidate_ids if settings.num_candidates else None,
        )
        extras = LossExtras(
            mask=row.term_mask,
            sample=row.term_sample,
            sampler_ids=row.sampler_ids,
            policy_top_log_probs=log_probs[:, 1:],
            sampler_log_probs=row.sampler_log_probs,
            entropy=entropy,
            versions=row.term_versions,
        )
        return log_probs[:, 0], extras

    def _init_optimizer(self, params: Params) -> Any:
        """The optimizer computes in float32 whatever dtype the parameters have: a second moment in bfloat16 would never
        follow a decay of 0.999, whose change of 1/1000 is below half a unit of its last place."""
        return self.optimizer.init(_as_float32(params))

    def _apply_update(
        self, state: TrainState, gradients: Params, num_tokens: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        mean = jax.tree.map(lambda g: g / jnp.maximum(num_tokens, 1.0), gradients)
        norm = optax.tree.norm(mean)
        before = _as_float32(state.params)
        updates, opt_state = self.optimizer.update(mean, state.opt_state, before)
        updated = optax.apply_updates(before, updates)
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, state.params)
        finite = jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        return TrainState(params, opt_state, state.step + 1), norm


def _as_float32(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def batch_shapes(num_rows: int, size: int, num_sampler_logprobs: int, num_candidates: int) -> TreeBatch:
    """Shapes and dtypes of a ``TreeBatch`` of bucket ``size`` (T = M = size)."""

    def shape(dtype: Any, *dims: int) -> Any:
        return jax.ShapeDtypeStruct((num_rows, *dims), dtype)

    i32, f32 = jnp.int32, jnp.float32
    return TreeBatch(
        tokens=shape(i32, size),
        positions=shape(i32, size),
        subtree_end=shape(i32, size),
        num_tokens=shape(i32),
        term_index=shape(i32, size),
        targets=shape(i32, size),
        old_log_probs=shape(f32, size),
        advantages=shape(f32, size),
        term_mask=shape(jnp.bool_, size),
        term_sample=shape(i32, size),
        term_versions=shape(i32, size),
        sampler_ids=shape(i32, size, num_sampler_logprobs),
        sampler_log_probs=shape(f32, size, num_sampler_logprobs),
        candidate_ids=shape(i32, size, num_candidates),
        num_terms=shape(i32),
    )


def reduce_rows(name: str, values: jax.Array, mask: jax.Array) -> jax.Array:
    """A metric over all rows, as float32 [2] (numerator, denominator); nothing to reduce: (nan, 1) or (0, 0)."""
    values = values.astype(jnp.float32)
    how = reduction(name)
    if how in ("max", "min"):
        fill, combine = (-jnp.inf, lax.pmax) if how == "max" else (jnp.inf, lax.pmin)
        local = jnp.where(mask, values, fill)
        extreme = combine(local.max() if how == "max" else local.min(), shard.ROW_AXES)
        return jnp.stack([extreme, jnp.ones_like(extreme)])
    total = lax.psum(jnp.where(mask, values, 0.0).sum(), shard.ROW_AXES)
    return jnp.stack([total, lax.psum(mask.sum().astype(jnp.float32), shard.ROW_AXES)])


def observations(metrics: dict[str, jax.Array]) -> list[Observation]:
    """A micro-batch's metrics on the host; those without any term (±inf) are left out."""
    pairs = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
    return [Observation(name, *pair.tolist()) for name, pair in pairs.items() if np.isfinite(pair).all()]


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
