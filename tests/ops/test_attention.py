from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ajgrpo.ops.attention import TreeMask, live_pairs, tree_attention, visible
from tests.ops import reference

SCALE = 0.31


def tree_mask(tree: reference.Tree) -> TreeMask:
    return TreeMask(jnp.asarray(tree.subtree_end), jnp.asarray(tree.depth))


def inputs(rng: np.random.Generator, length: int, heads: int, groups: int, size: int, dtype=jnp.float32):
    """q, k, v and a cotangent of the output."""
    shapes = [(length, heads, size), (length, groups, size), (length, groups, size), (length, heads, size)]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnames=("softcap", "implementation", "block"))
def attend_and_differentiate(q, k, v, d_out, mask, window=0, softcap=None, implementation="xla", block=256):
    """Output and the gradients of q, k, v; the window is traced."""
    attend = functools.partial(
        tree_attention,
        mask=mask,
        scale=SCALE,
        window=window,
        softcap=softcap,
        implementation=implementation,
        block=block,
    )
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


def test_mask_is_the_drawing():
    mask = TreeMask(jnp.array([5, 5, 4, 4, 5, 6]), jnp.array([0, 1, 2, 3, 2, 0]))
    drawing = """
        x . . . . .
        x x . . . .
        x x x . . .
        x x x x . .
        x x . . x .
        . . . . . x
    """
    expected = np.array([[cell == "x" for cell in line.split()] for line in drawing.strip().splitlines()])
    np.testing.assert_array_equal(visible(mask), expected)


def test_window_counts_depth_not_row_distance():
    mask = TreeMask(jnp.array([5, 5, 4, 4, 5, 6]), jnp.array([0, 1, 2, 3, 2, 0]))
    # Query 4 (depth 2) lies three places after key 1 in the row, but only one step below it in the tree.
    np.testing.assert_array_equal(visible(mask, 2)[4], [False, True, False, False, True, False])


def test_mask_equals_walking_up_the_parents():
    rng = np.random.default_rng(0)
    for fork in (0.0, 0.05, 0.5, 1.0):
        tree = reference.random_tree(rng, 60, pads=5, fork=fork)
        for window in (0, 1, 4):
            np.testing.assert_array_equal(visible(tree_mask(tree), window), tree.visible(window))


CASES = {
    # name: (positions, pads, block, heads, groups, head size, window, softcap)
    "several blocks": (200, 0, 64, 4, 2, 16, 0, None),
    "one block": (37, 3, 64, 4, 4, 8, 0, None),
    "not a multiple of the block": (131, 9, 32, 6, 2, 8, 0, None),
    "one key head": (100, 0, 32, 4, 1, 8, 0, None),
    "window": (200, 0, 32, 2, 2, 8, 7, None),
    "window of one": (70, 0, 32, 2, 1, 8, 1, None),
    "softcap": (130, 0, 64, 4, 2, 8, 0, 0.7),
    "window and softcap": (150, 10, 32, 4, 2, 8, 20, 0.7),
    "one position": (1, 0, 256, 2, 1, 8, 0, None),
}


@pytest.mark.parametrize("implementation", ["xla", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_against_float64(case: str, implementation: str):
    positions, pads, block, heads, groups, size, window, softcap = CASES[case]
    rng = np.random.default_rng(len(case))
    tree = reference.random_tree(rng, positions, pads)
    arrays = inputs(rng, positions + pads, heads, groups, size)
    found = attend_and_differentiate(
        *arrays, tree_mask(tree), window, softcap=softcap, implementation=implementation, block=block
    )
    expected = reference.attention(*map(np.asarray, arrays), tree.visible(window), SCALE, softcap)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert reference.relative_error(x, y) < 3e-6, name


def test_static_traced_and_absent_windows_agree():
    rng = np.random.default_rng(1)
    mask = tree_mask(reference.random_tree(rng, 90))
    q, k, v, _ = inputs(rng, 90, 2, 1, 8)
    attend = jax.jit(tree_attention, static_argnames=("scale", "window", "block"))
    traced = jax.jit(lambda window: tree_attention(q, k, v, mask, scale=SCALE, window=window, block=32))
    np.testing.assert_array_equal(traced(jnp.int32(5)), attend(q, k, v, mask, scale=SCALE, window=5, block=32))
    np.testing.assert_array_equal(traced(jnp.int32(0)), attend(q, k, v, mask, scale=SCALE, window=None, block=32))
    assert np.abs(traced(jnp.int32(0)) - traced(jnp.int32(5))).max() > 0.1


def test_large_scores_stay_finite_and_exact():
    rng = np.random.default_rng(2)
    tree = reference.random_tree(rng, 90)
    q, k, v, d_out = inputs(rng, 90, 2, 1, 8)
    arrays = (q * 300.0, k, v, d_out)  # scores of several hundred: exp overflows wherever a maximum is not subtracted
    found = attend_and_differentiate(*arrays, tree_mask(tree), block=32)
    expected = reference.attention(*map(np.asarray, arrays), tree.visible(), SCALE, None)
    for x, y in zip(found, expected, strict=True):
        assert reference.relative_error(x, y) < 1e-3


@pytest.mark.parametrize("implementation", ["xla", "dense"])
def test_pads_are_finite_and_change_nothing(implementation: str):
    rng = np.random.default_rng(3)
    tree = reference.random_tree(rng, 70, pads=20)
    q, k, v, d_out = inputs(rng, 90, 2, 1, 8)
    run = functools.partial(attend_and_differentiate, implementation=implementation, block=32)
    d_out = d_out.at[70:].set(0.0)
    plain = run(q, k, v, d_out, tree_mask(tree))
    loud = run(*(x.at[70:].multiply(1e3) for x in (q, k, v)), d_out, tree_mask(tree))
    for x, y in zip(plain, loud, strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(x[:70], y[:70])
    for gradient in loud[1:]:
        np.testing.assert_array_equal(gradient[70:], 0.0)


def test_a_sample_in_a_tree_equals_the_sample_alone():
    """Prefix of 40 positions, then suffixes of 30 and 20: both paths, cut out, give the outputs of a plain row."""
    rng = np.random.default_rng(4)
    tree = reference.tree_from_parents([*range(-1, 69), 39, *range(70, 89)])
    q, k, v, d_out = inputs(rng, 90, 2, 1, 8)
    packed = attend_and_differentiate(q, k, v, d_out, tree_mask(tree), block=32)
    alone_gradients = [np.zeros(x.shape) for x in (q, k, v)]
    for path, counted in ((np.arange(70), 0), (np.r_[0:40, 70:90], 40)):  # the prefix's own loss counts once
        pads = 90 - len(path)
        chain = reference.tree_from_parents([*range(-1, len(path) - 1)] + [-1] * pads)
        row = (jnp.pad(x[path], ((0, pads), (0, 0), (0, 0))) for x in (q, k, v, d_out.at[:counted].set(0.0)))
        alone = [x[: len(path)] for x in attend_and_differentiate(*row, tree_mask(chain), block=32)]
        np.testing.assert_allclose(packed[0][path], alone[0], atol=2e-6)
        for total, gradient in zip(alone_gradients, alone[1:], strict=True):
            total[path] += gradient
    for total, gradient in zip(alone_gradients, packed[1:], strict=True):
        np.testing.assert_allclose(gradient, total, atol=1e-5)


def test_rerun_gives_the_same_bits():
    rng = np.random.default_rng(5)
    mask = tree_mask(reference.random_tree(rng, 200))
    arrays = inputs(rng, 200, 4, 2, 16)
    first = attend_and_differentiate(*arrays, mask, block=64)
    second = attend_and_differentiate(*arrays, mask, block=64)
    for x, y in zip(first, second, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_the_default_block_suits_the_backend():
    rng = np.random.default_rng(11)
    mask = tree_mask(reference.random_tree(rng, 300))
    arrays = inputs(rng, 300, 4, 2, 16)
    suited, other = (64, 256) if jax.default_backend() == "cpu" else (256, 64)
    default, same, different = (attend_and_differentiate(*arrays, mask, block=block) for block in (None, suited, other))
    for x, y in zip(default, same, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any((x != y).any() for x, y in zip(default, different, strict=True)), "another block sums in another order"


def test_bfloat16_inputs():
    rng = np.random.default_rng(6)
    tree = reference.random_tree(rng, 150)
    arrays = inputs(rng, 150, 4, 2, 16, jnp.bfloat16)
    found = attend_and_differentiate(*arrays, tree_mask(tree), block=64)
    expected = reference.attention(*(np.asarray(x.astype(jnp.float32)) for x in arrays), tree.visible(), SCALE, None)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        assert reference.relative_error(x.astype(jnp.float32), y) < 1e-2


def compiled_gradient(length: int):
    like = [jax.ShapeDtypeStruct((length, heads, 16), jnp.float32) for heads in (2, 1, 1, 2)]
    index = jax.ShapeDtypeStruct((length,), jnp.int32)
    return attend_and_differentiate.lower(*like, TreeMask(index, index), block=128).compile()


def largest_array(hlo: str) -> int:
    """Elements of the largest array in compiled HLO text."""
    shapes = re.findall(r"\b(?:f32|f16|bf16|s32|u32|s64|pred|s8|u8)\[([\d,]+)\]", hlo)
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


def test_memory_is_linear_in_the_row():
    short, long = compiled_gradient(1024), compiled_gradient(4096)
    assert largest_array(long.as_text()) < 4096 * 4096 / 16
    growth = long.memory_analysis().temp_size_in_bytes / short.memory_analysis().temp_size_in_bytes
    assert growth < 4.5
    dense = jax.jit(functools.partial(tree_attention, scale=SCALE, implementation="dense"))
    like = [jax.ShapeDtypeStruct((1024, heads, 16), jnp.float32) for heads in (2, 1, 1)]
    index = jax.ShapeDtypeStruct((1024,), jnp.int32)
    dense_text = dense.lower(*like, TreeMask(index, index)).compile().as_text()
    assert largest_array(dense_text) >= 1024 * 1024, "the probe must be able to see a T×T array"


def count_live(parent: list[int], block: int, window: int = 2**30) -> int:
    tree = reference.tree_from_parents(parent)
    arrays = (jnp.asarray(tree.subtree_end), jnp.asarray(tree.depth), jnp.int32(window))
    return int(live_pairs(*arrays, block)[2])


def test_work_follows_the_tree():
    chain = list(range(-1, 255))
    assert count_live(chain, 32) == 8 * 9 // 2
    samples_of_64 = [i - 1 if i % 64 else -1 for i in range(256)]
    assert count_live(samples_of_64, 32) == 4 * 3
    shared_64_then_suffixes_of_32 = [i - 1 if i < 64 or i % 32 else 63 for i in range(256)]
    assert count_live(shared_64_then_suffixes_of_32, 32) == 3 + 6 * 3
    assert count_live(chain, 32, window=2) == 8 + 7


def test_no_visible_pair_lies_in_a_skipped_block():
    rng = np.random.default_rng(7)
    for seed in range(20):
        tree = reference.random_tree(rng, 90, pads=6, fork=0.1)
        window = (0, 3, 17)[seed % 3]
        arrays = (jnp.asarray(tree.subtree_end), jnp.asarray(tree.depth), jnp.int32(window or 2**30))
        q_blocks, k_blocks, count = live_pairs(*arrays, 16)
        live = set(zip(q_blocks[:count].tolist(), k_blocks[:count].tolist(), strict=True))
        needed = {(int(i) // 16, int(j) // 16) for i, j in np.argwhere(tree.visible(window))}
        assert needed <= live


def test_inside_checkpoint_and_scan_with_a_traced_window():
    rng = np.random.default_rng(8)
    mask = tree_mask(reference.random_tree(rng, 60))
    q, k, v, _ = inputs(rng, 60, 2, 1, 8)
    windows = jnp.array([0, 4, 9], jnp.int32)

    def layer(x, window):
        return x + tree_attention(x, k, v, mask, scale=SCALE, window=window, block=32)

    def scanned(x):
        return jnp.square(jax.lax.scan(lambda c, w: (jax.checkpoint(layer)(c, w), None), x, windows)[0]).sum()

    def unrolled(x):
        for window in (0, 4, 9):
            x = x + tree_attention(x, k, v, mask, scale=SCALE, window=window, implementation="dense")
        return jnp.square(x).sum()

    value, gradient = jax.jit(jax.value_and_grad(scanned))(q)
    expected_value, expected_gradient = jax.jit(jax.value_and_grad(unrolled))(q)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-5)


def test_inside_shard_map_each_device_has_its_own_row():
    rng = np.random.default_rng(9)
    trees = [reference.random_tree(rng, 40, fork=fork) for fork in np.linspace(0, 0.5, 8)]
    mask = TreeMask(*(jnp.stack([jnp.asarray(getattr(t, name)) for t in trees]) for name in ("subtree_end", "depth")))
    rows = [inputs(rng, 40, 2, 1, 8) for _ in trees]
    q, k, v, d_out = (jnp.stack(arrays) for arrays in zip(*rows, strict=True))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(*row):
        q, k, v, d_out, mask = jax.tree.map(lambda x: x[0], row)
        return jax.tree.map(lambda x: x[None], attend_and_differentiate(q, k, v, d_out, mask, block=16))

    spec = PartitionSpec("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = jax.jit(run)(q, k, v, d_out, mask)
    for r, (tree, row) in enumerate(zip(trees, rows, strict=True)):
        expected = reference.attention(*map(np.asarray, row), tree.visible(), SCALE, None)
        for x, y in zip(found, expected, strict=True):
            assert reference.relative_error(x[r], y) < 3e-6


def test_unsuitable_arguments_are_refused():
    rng = np.random.default_rng(10)
    mask = tree_mask(reference.random_tree(rng, 10))
    q, k, v, _ = inputs(rng, 10, 4, 2, 8)
    with pytest.raises(ValueError, match="one of auto, xla, dense, got 'pallas'"):
        tree_attention(q, k, v, mask, scale=1.0, implementation="pallas")
    with pytest.raises(ValueError, match="multiple of G"):
        tree_attention(q[:, :3], k, v, mask, scale=1.0)
    with pytest.raises(ValueError, match="10 positions"):
        tree_attention(q, k, v, TreeMask(mask.subtree_end[:9], mask.positions), scale=1.0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        tree_attention(q, k, v, mask, scale=1.0, window=-1)
