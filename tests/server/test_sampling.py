import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.server.sampling import BLOCK, Controls, draw, sample, support

jitted = jax.jit(sample, static_argnames=("num_top", "num_candidates"))


def controls(num_slots, *, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seeds=None, index=0) -> Controls:
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (num_slots,)))

    seeds = np.arange(num_slots) if seeds is None else np.asarray(seeds)
    pairs = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=-1).astype(np.uint32)
    return Controls(
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(min_p, np.float32),
        full(top_k, np.int32),
        jnp.asarray(pairs),
        full(index, np.int32),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def truncated(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """vLLM's rule for one distribution, step by step."""
    order = [int(token) for token in np.argsort(-probs) if probs[token] >= min_p * probs.max()]
    order = order[:top_k] if top_k else order
    total, mass, kept = sum(probs[token] for token in order), 0.0, []
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    return set(kept)


@pytest.mark.parametrize("vocab", [7, BLOCK, 2 * BLOCK + 5])
def test_draw_inverts_the_distribution_function(vocab):
    probs = np.random.default_rng(vocab).dirichlet(np.full(vocab, 0.3)).astype(np.float32)
    probs[1::3] = 0.0
    uniform = (np.arange(4096) + 0.5).astype(np.float32) / 4096
    tokens = np.asarray(jax.jit(draw)(jnp.broadcast_to(probs, (4096, vocab)), uniform))
    edges = np.cumsum(probs.astype(np.float64)) / probs.sum(dtype=np.float64)
    expected = np.searchsorted(edges, uniform, side="right")
    assert np.mean(tokens != expected) < 1e-3  # rounding at the edges
    assert (probs[tokens] > 0).all()


def test_draw_at_the_ends_never_gives_a_token_without_mass():
    probs = jnp.asarray([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]], jnp.float32)
    for uniform in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
        tokens = np.asarray(draw(probs, jnp.full(2, uniform, jnp.float32)))
        assert tokens[1] == 2
        assert tokens[0] == (1 if uniform == 0.0 else 3)


def test_frequencies_follow_the_tempered_softmax():
    num_slots, vocab = 20_000, 12
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
    out = jitted(
        jnp.broadcast_to(logits, (num_slots, vocab)), controls(num_slots, temperature=0.7), num_top=1, num_candidates=0
    )
    probs = softmax(logits / 0.7)
    counts = np.bincount(np.asarray(out.token), minlength=vocab)
    spread = np.sqrt(num_slots * probs * (1 - probs))
    assert (np.abs(counts - num_slots * probs) < 4.5 * spread + 1).all()
    np.testing.assert_allclose(np.asarray(out.log_prob), np.log(probs)[np.asarray(out.token)], atol=2e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (10, 0.6, 0.02), (1, 1.0, 0.0)]
)
def test_truncation_keeps_vllms_support_and_renormalises(top_k, top_p, min_p):
    num_slots, vocab = 64, 40
    logits = np.random.default_rng(1).normal(size=(num_slots, vocab)).astype(np.float32) * 2
    given = controls(num_slots, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    out = jitted(jnp.asarray(logits), given, num_top=8, num_candidates=top_k or vocab)
    probs = softmax(logits / 1.3)
    for slot in range(num_slots):
        kept = truncated(probs[slot], top_k, top_p, min_p)
        candidates = [int(token) for token in out.candidates[slot] if token >= 0]
        assert set(candidates) == kept
        assert len(candidates) == len(kept)
        total = sum(probs[slot][token] for token in kept)
        token = int(out.token[slot])
        assert token in kept
        assert float(out.log_prob[slot]) == pytest.approx(np.log(probs[slot][token] / total), abs=2e-6)
        for top, log_prob in zip(out.top_ids[slot].tolist(), out.top_log_probs[slot].tolist(), strict=True):
            expected = np.log(probs[slot][top] / total) if top in kept else -np.inf
            assert log_prob == pytest.approx(expected, abs=2e-6)


def test_truncated_draws_follow_the_renormalised_distribution():
    num_slots, vocab = 20_000, 30
    logits = np.random.default_rng(2).normal(size=vocab).astype(np.float32)
    given = controls(num_slots, top_k=4)
    out = jitted(jnp.broadcast_to(logits, (num_slots, vocab)), given, num_top=1, num_candidates=8)
    probs = softmax(logits)
    kept = np.argsort(-probs)[:4]
    share = probs[kept] / probs[kept].sum()
    counts = np.bincount(np.asarray(out.token), minlength=vocab)
    assert counts.sum() == counts[kept].sum()
    assert (np.abs(counts[kept] - num_slots * share) < 4.5 * np.sqrt(num_slots * share * (1 - share)) + 1).all()


def test_slots_with_and_without_truncation_share_a_step():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32))
    given = controls(3, temperature=np.array([1.0, 1.0, 0.0]), top_k=np.array([0, 3, 3]))
    mixed = jitted(logits, given, num_top=2, num_candidates=4)
    plain = jitted(logits, controls(3, temperature=np.array([1.0, 1.0, 0.0])), num_top=2, num_candidates=0)
    assert (mixed.token[0], mixed.log_prob[0]) == (plain.token[0], plain.log_prob[0])
    assert [int((row >= 0).sum()) for row in mixed.candidates] == [0, 3, 0]
    assert int(mixed.token[2]) == int(jnp.argmax(logits[2]))
    np.testing.assert_allclose(mixed.log_prob[2], jax.nn.log_softmax(logits[2]).max(), atol=1e-6)


def test_top_p_of_one_keeps_everything_whatever_the_rounding():
    values = jnp.sort(jnp.asarray(np.random.default_rng(4).normal(size=(8, 4000)).astype(np.float32)))[:, ::-1]
    kept = jax.jit(support)(values, controls(8, top_k=4000))
    assert bool(kept.all())


def test_random_numbers_depend_on_seed_and_position_only():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(1, 200)).astype(np.float32))
    step = functools.partial(jitted, num_top=1, num_candidates=0)
    seeds = np.array([7, 2**40 + 7, 7, 8])
    index = np.array([0, 0, 1, 0])
    together = step(jnp.broadcast_to(logits, (4, 200)), controls(4, seeds=seeds, index=index)).token
    assert len(set(together.tolist())) == 4  # the high half of a seed counts, and so does the position
    for slot in range(4):
        alone = step(logits, controls(1, seeds=seeds[slot : slot + 1], index=index[slot])).token
        assert int(alone[0]) == int(together[slot])
