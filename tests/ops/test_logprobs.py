from __future__ import annotations

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.ops.logprobs import head_statistics
from tests.ops import reference

ROWS, VOCABULARY, HIDDEN = 21, 53, 12


@functools.partial(jax.jit, static_argnames=("temperature", "softcap", "row_tile", "vocab_tile"))
def statistics_and_gradients(hidden, kernel, ids, num_rows, d_log_probs, d_entropy, candidates=None, **static):
    """Log-probs, entropy, and the gradients of hidden and kernel."""

    def statistics(hidden, kernel):
        return head_statistics(hidden, kernel, ids, num_rows, candidate_ids=candidates, **static)

    results, pull = jax.vjp(statistics, hidden, kernel)
    return *results, *pull((d_log_probs, d_entropy))


def inputs(seed: int, rows: int = ROWS, ids: int = 5):
    """hidden, kernel, ids with pads and repeats, and cotangents of log-probs and entropy; float32."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    kernel = rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    chosen = rng.integers(0, VOCABULARY, size=(rows, ids)).astype(np.int32)
    chosen[:, 1] = chosen[:, 0]  # the target is usually one of the sampler's likely tokens as well
    chosen[::3, 4] = chosen[::3, 0]
    chosen[::2, 3] = -1
    chosen[5] = -1
    chosen[6, :2] = (0, VOCABULARY - 1)
    return (
        hidden,
        kernel,
        chosen,
        rng.normal(size=chosen.shape).astype(np.float32),
        rng.normal(size=rows).astype(np.float32),
    )


def some_candidates(seed: int, ids: np.ndarray) -> np.ndarray:
    """[rows, 9] distinct ids and -1 pads: some hold the row's ids, some do not, and one row names none."""
    rng = np.random.default_rng(seed)
    found = np.full((len(ids), 9), -1, np.int32)
    for row, chosen in zip(found, ids, strict=True):
        pool = np.unique(np.concatenate([chosen[chosen >= 0][:2], rng.permutation(VOCABULARY)[: rng.integers(1, 7)]]))
        row[rng.permutation(9)[: len(pool)]] = pool
    found[2] = -1
    return found


CASES = {
    # name: (temperature, softcap, with candidates, row tile, vocabulary tile, live rows)
    "one tile": (1.0, None, False, 512, 4096, ROWS),
    "tiles that divide": (1.0, None, False, 7, 53, ROWS),
    "overlapping tiles": (1.0, None, False, 8, 10, ROWS),
    "temperature": (0.6, None, False, 8, 16, ROWS),
    "softcap and temperature": (1.7, 2.5, False, 8, 16, ROWS),
    "some rows live": (0.9, None, False, 8, 16, 11),
    "live rows end with a tile": (0.9, None, False, 8, 16, 16),
    "no row live": (0.9, None, False, 8, 16, 0),
    "more live rows than rows": (0.9, None, False, 8, 16, ROWS + 9),
    "candidates": (1.0, None, True, 8, 16, ROWS),
    "candidates, softcap, temperature, some rows": (0.7, 2.5, True, 8, 16, 13),
}


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case: str):
    temperature, softcap, with_candidates, row_tile, vocab_tile, num_rows = CASES[case]
    hidden, kernel, ids, d_log_probs, d_entropy = inputs(len(case))
    candidates = some_candidates(1, ids) if with_candidates else None
    found = statistics_and_gradients(
        hidden,
        kernel,
        ids,
        num_rows,
        d_log_probs,
        d_entropy,
        candidates,
        temperature=temperature,
        softcap=softcap,
        row_tile=row_tile,
        vocab_tile=vocab_tile,
    )
    expected = reference.head(
        hidden,
        kernel,
        ids,
        min(num_rows, ROWS),
        d_log_probs,
        d_entropy,
        temperature=temperature,
        softcap=softcap,
        candidates=candidates,
    )
    outside = np.isneginf(expected[0])
    assert outside.any() == with_candidates
    np.testing.assert_array_equal(np.isneginf(found[0]), outside)
    np.testing.assert_allclose(np.where(outside, 0, found[0]), np.where(outside, 0, expected[0]), rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=4e-6)
    assert reference.relative_error(found[2], expected[2]) < 3e-6
    assert reference.relative_error(found[3], expected[3]) < 3e-6
    if num_rows < ROWS:
        for array in found[:3]:
            np.testing.assert_array_equal(array[num_rows:], 0.0)


def test_default_tiles_that_divide_neither_rows_nor_vocabulary():
    """More rows and entries than one default tile holds, on any backend."""
    rows, vocabulary = 1100, 4500
    rng = np.random.default_rng(12)
    hidden, kernel = rng.normal(size=(rows, 4)).astype(np.float32), rng.normal(size=(vocabulary, 4)).astype(np.float32)
    ids = rng.integers(vocabulary, size=(rows, 3)).astype(np.int32)
    grads = rng.normal(size=ids.shape).astype(np.float32), rng.normal(size=rows).astype(np.float32)
    found = statistics_and_gradients(hidden, kernel, ids, 1030, *grads, temperature=1.0)
    expected = reference.head(hidden, kernel, ids, 1030, *grads, temperature=1.0, softcap=None, candidates=None)
    for x, y in zip(found, expected, strict=True):
        assert reference.relative_error(x, y) < 3e-6


def test_padded_ids_give_zero_and_no_gradient():
    hidden, kernel, ids, d_log_probs, d_entropy = inputs(3)
    run = functools.partial(statistics_and_gradients, temperature=1.0, row_tile=8, vocab_tile=16)
    log_probs, _, d_hidden, _ = run(hidden, kernel, ids, ROWS, d_log_probs, 0 * d_entropy)
    np.testing.assert_array_equal(log_probs[ids < 0], 0.0)
    assert (np.asarray(log_probs)[ids >= 0] < 0).all()
    np.testing.assert_array_equal(d_hidden[5], 0.0)  # a row whose ids are all pads
    louder = run(hidden, kernel, ids, ROWS, np.where(ids < 0, 1e6, d_log_probs), 0 * d_entropy)
    np.testing.assert_array_equal(louder[2], d_hidden)


def test_a_token_outside_its_candidates_is_impossible_and_has_no_gradient():
    hidden, kernel, _, _, _ = inputs(4)
    ids = np.full((ROWS, 1), 7, np.int32)
    candidates = np.tile(np.array([[3, 5, -1, 9]], np.int32), (ROWS, 1))
    ones, zeros = np.ones((ROWS, 1), np.float32), np.zeros(ROWS, np.float32)
    run = functools.partial(statistics_and_gradients, temperature=1.0, row_tile=8, vocab_tile=16)
    log_probs, _, d_hidden, d_kernel = run(hidden, kernel, ids, ROWS, ones, zeros, candidates)
    assert np.isneginf(log_probs).all()
    np.testing.assert_array_equal(d_hidden, 0.0)
    np.testing.assert_array_equal(d_kernel, 0.0)


def test_candidates_cover_probability_one():
    hidden, kernel, _, d_log_probs, d_entropy = inputs(5, ids=5)
    candidates = np.tile(np.array([[3, 5, -1, 9, 52]], np.int32), (ROWS, 1))
    run = functools.partial(statistics_and_gradients, temperature=1.0, row_tile=8, vocab_tile=16)
    log_probs, entropy, *_ = run(hidden, kernel, candidates, ROWS, d_log_probs, d_entropy, candidates)
    p = np.where(candidates >= 0, np.exp(log_probs), 0.0)
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(entropy, -(p * log_probs).sum(1), rtol=1e-5)


def test_dead_rows_with_wild_contents_change_nothing():
    hidden, kernel, ids, d_log_probs, d_entropy = inputs(6)
    run = functools.partial(statistics_and_gradients, temperature=1.0, row_tile=8, vocab_tile=16)
    plain = run(hidden, kernel, ids, 11, d_log_probs, d_entropy)
    for contents in (1e30, np.nan):
        wild = hidden.copy()
        wild[11:] = contents
        for x, y in zip(plain, run(wild, kernel, ids, 11, d_log_probs, d_entropy), strict=True):
            np.testing.assert_array_equal(x, y)


def test_large_logits_keep_the_entropy_exact():
    """One logit of 2000 beside one of 1999: the entropy is that of p = (e, 1) / (1 + e)."""
    hidden = np.full((1, 2), 1000.0, np.float32)
    kernel = np.zeros((VOCABULARY, 2), np.float32)
    kernel[4], kernel[40] = (1.0, 1.0), (1.0, 0.999)
    log_probs, entropy = head_statistics(
        jnp.asarray(hidden), jnp.asarray(kernel), jnp.array([[4, 40]]), 1, temperature=1.0, vocab_tile=16
    )
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(log_probs, [[np.log(p), np.log(1 - p)]], atol=3e-4)  # float32 spacing at 2000
    np.testing.assert_allclose(entropy, [-(p * np.log(p) + (1 - p) * np.log(1 - p))], rtol=1e-5)


def test_rerun_gives_the_same_bits():
    hidden, kernel, ids, d_log_probs, d_entropy = inputs(7)
    run = functools.partial(statistics_and_gradients, temperature=1.0, row_tile=8, vocab_tile=16)
    first, second = (run(hidden, kernel, ids, ROWS, d_log_probs, d_entropy) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_bfloat16_weights_get_bfloat16_gradients_summed_in_float32():
    """Many equal rows: a bfloat16 sum would stop growing at 256 addends."""
    rows = 1024
    rng = np.random.default_rng(8)
    hidden = jnp.asarray(np.tile(rng.normal(size=(1, HIDDEN)), (rows, 1)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(VOCABULARY, HIDDEN)), jnp.bfloat16)
    ids = np.full((rows, 1), 7, np.int32)
    ones, zeros = np.ones((rows, 1), np.float32), np.zeros(rows, np.float32)
    found = statistics_and_gradients(
        hidden, kernel, ids, rows, ones, zeros, temperature=1.0, row_tile=64, vocab_tile=16
    )
    expected = reference.head(
        np.asarray(hidden[:1].astype(jnp.float32)),
        np.asarray(kernel.astype(jnp.float32)),
        ids[:1],
        1,
        ones[:1],
        zeros[:1],
        temperature=1.0,
        softcap=None,
        candidates=None,
    )
    assert found[2].dtype == found[3].dtype == jnp.bfloat16
    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5)
    assert reference.relative_error(found[3].astype(jnp.float32), rows * expected[3]) < 1e-2


def compiled(rows: int, vocabulary: int):
    f32, i32 = jnp.float32, jnp.int32
    like = [((rows, 16), f32), ((vocabulary, 16), f32), ((rows, 9), i32), ((), i32), ((rows, 9), f32), ((rows,), f32)]
    return statistics_and_gradients.lower(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in like), temperature=1.0, row_tile=128, vocab_tile=512
    ).compile()


def test_no_array_holds_all_logits():
    rows, vocabulary = 1024, 8000
    text = compiled(rows, vocabulary).as_text()
    sizes = [
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(r"\b(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", text)
    ]
    assert max(sizes) <= vocabulary * 16  # the kernel itself


def test_work_follows_the_live_rows():
    run = compiled(16384, 512)
    arrays = [jnp.zeros(x.shape, x.dtype) for x in run.in_avals[0]]

    def seconds(num_rows: int) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays[:3], jnp.int32(num_rows), *arrays[4:]))
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(128) < 0.5 * seconds(16384)


def test_unsuitable_arguments_are_refused():
    hidden, kernel, ids, _, _ = (jnp.asarray(x) for x in inputs(9))
    with pytest.raises(ValueError, match=r"hidden must be \[M, H\]"):
        head_statistics(hidden[:, 1:], kernel, ids, 1, temperature=1.0)
    with pytest.raises(ValueError, match="candidate_ids must be 2-dimensional with 21 rows"):
        head_statistics(hidden, kernel, ids, 1, temperature=1.0, candidate_ids=ids[1:])
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        head_statistics(hidden, kernel, ids, 1, temperature=0.0)
