import threading
from concurrent.futures import Future

import numpy as np
import pytest

from ajgrpo.errors import ServerError
from ajgrpo.inference.protocol import GenerateResponse, SamplingParams, WeightSpan
from ajgrpo.server.engine import Engine, EngineOptions
from ajgrpo.server.inputs import num_candidates, num_top
from ajgrpo.server.scheduler import Generation
from tests.server.conftest import OPTIONS, started_engine
from tests.server.models import CONFIG, PROMPT, params, reference, token_log_probs

LIMIT = 60


def reply(future: Future[Generation]) -> GenerateResponse:
    return future.result(LIMIT).response()


def run(engine: Engine, prompt=PROMPT, **kwargs) -> GenerateResponse:
    return reply(
        engine.submit(list(prompt), SamplingParams(**({"seed": 1, "logprobs": 9, "ignore_eos": True} | kwargs)))
    )


def wait_for(condition) -> None:
    """Polls the engine's snapshot, which changes after every decode step."""
    pause = threading.Event()
    for _ in range(LIMIT * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("the condition did not come true")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_one_forward_pass(engine, temperature):
    # 150 tokens: the cache grows once on the way.
    out = run(engine, max_tokens=143, temperature=temperature)
    assert len(out.token_ids) == 143
    table = reference(PROMPT + out.token_ids, 0, temperature)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(out.log_probs, table[np.arange(143), out.token_ids], atol=2e-5)
    for row, top in zip(table, out.top_log_probs, strict=False):
        assert len(top) == 9
        np.testing.assert_allclose(list(top.values()), row[list(top)], atol=2e-5)
        likeliest = set(np.argsort(-row)[:8].tolist())
        assert likeliest <= set(top)


def test_the_drawn_token_comes_first_and_counts(engine):
    out = run(engine, max_tokens=20, logprobs=1)
    assert [list(top) for top in out.top_log_probs] == [[token] for token in out.token_ids]
    assert [top[token] for top, token in zip(out.top_log_probs, out.token_ids, strict=True)] == out.log_probs
    assert [top for top in run(engine, max_tokens=3, logprobs=0).top_log_probs] == [{}, {}, {}]
    assert run(engine, max_tokens=3, logprobs=None).log_probs is None


def test_seeds_decide_whatever_shares_the_batch(engine):
    alone = [run(engine, PROMPT[: 3 + i], seed=i, max_tokens=30) for i in range(8)]
    futures = [
        engine.submit(PROMPT[: 3 + i], SamplingParams(seed=i, max_tokens=30, logprobs=9, ignore_eos=True))
        for i in range(8)
    ]
    together = [reply(future) for future in futures]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
    assert len({tuple(out.token_ids) for out in alone}) == 8


def test_requests_without_a_seed_differ(engine):
    assert run(engine, seed=None, max_tokens=20).token_ids != run(engine, seed=None, max_tokens=20).token_ids


def test_greedy_is_the_argmax_alone_and_in_a_batch(engine):
    greedy = SamplingParams(temperature=0.0, max_tokens=25, logprobs=2, ignore_eos=True)
    alone = reply(engine.submit(PROMPT, greedy))
    futures = [engine.submit(PROMPT[:length], greedy) for length in (7, 3, 7, 1, 5, 2)]
    together = [reply(future) for future in futures]
    assert together[0].token_ids == together[2].token_ids == alone.token_ids
    table = reference(PROMPT + alone.token_ids)[len(PROMPT) - 1 : -1]
    assert alone.token_ids == table.argmax(axis=-1).tolist()
    np.testing.assert_allclose(alone.log_probs, table.max(axis=-1), atol=2e-5)


def test_truncated_sampling_returns_its_candidates(engine):
    out = run(engine, max_tokens=40, top_k=5, top_p=0.9, temperature=0.8, logprobs=6)
    table = reference(PROMPT + out.token_ids, 0, 0.8)[len(PROMPT) - 1 :]
    for row, token, log_prob, kept, top in zip(
        table, out.token_ids, out.log_probs, out.sampling_mask, out.top_log_probs, strict=False
    ):
        order = np.argsort(-row)[:5]
        share = np.exp(row[order]) / np.exp(row[order]).sum()
        expected = order[np.cumsum(share) - share < 0.9].tolist()
        assert kept == expected
        assert token in kept
        assert log_prob == pytest.approx(row[token] - np.log(np.exp(row[expected]).sum()), abs=2e-5)
        assert {token for token, value in top.items() if value > -np.inf} == set(kept)
    assert run(engine, max_tokens=2).sampling_mask is None


def test_the_end_of_a_generation(engine):
    plain = run(engine, max_tokens=30)
    third = plain.token_ids[3]
    first = plain.token_ids.index(third)
    stopped = run(engine, max_tokens=30, stop_token_ids=(third,))
    assert (stopped.token_ids, stopped.finish_reason) == (plain.token_ids[: first + 1], "stop")
    clipped = run(engine, PROMPT * 22, max_tokens=1000)
    assert (len(clipped.token_ids), clipped.finish_reason) == (OPTIONS.max_model_len - 154, "length")
    assert len(run(engine, PROMPT * 22, max_tokens=None).token_ids) == 6
    assert len(run(engine, [7], max_tokens=3).token_ids) == 3


def test_the_models_end_token_ends_unless_ignored(engine):
    eos = CONFIG.eos_token_ids[0]
    for seed in range(200):
        tokens = run(engine, seed=seed, max_tokens=40).token_ids
        if eos in tokens[:-1]:
            break
    out = run(engine, seed=seed, max_tokens=40, ignore_eos=False)
    assert (out.token_ids, out.finish_reason) == (tokens[: tokens.index(eos) + 1], "stop")


def test_in_flight_requests_live_through_a_weight_swap(engine):
    """Tokens before the swap carry the old policy's log-probs, tokens after it the new one's over the whole history."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1], [9], PROMPT[2:]]  # one more than there are slots
    wanted = SamplingParams(max_tokens=120, logprobs=2, ignore_eos=True)
    before = engine.stats
    futures = [engine.submit(prompt, wanted) for prompt in prompts]
    wait_for(lambda: engine.stats.generation_tokens >= before.generation_tokens + 100)
    engine.pause().result(LIMIT)
    paused = engine.stats
    assert (paused.running, paused.waiting, paused.paused) == (0, 5, True)
    assert paused.preemptions == before.preemptions + 4
    engine.swap_weights(params(1), "1").result(LIMIT)
    late = engine.submit(PROMPT, wanted)
    assert engine.stats.generation_tokens == paused.generation_tokens
    engine.resume().result(LIMIT)
    outputs = [reply(future) for future in futures]
    mixed = 0
    for prompt, out in zip(prompts, outputs, strict=True):
        cut = 0 if out.weight_spans[0].version == "1" else out.weight_spans[0].end
        expected = (WeightSpan("default", 0, cut),) if cut else ()
        assert out.weight_spans == (*expected, WeightSpan("1", cut, 120))
        old = token_log_probs(prompt, out.token_ids, seed=0)
        new = token_log_probs(prompt, out.token_ids, seed=1)
        np.testing.assert_allclose(out.log_probs[:cut], old[:cut], atol=2e-5)
        np.testing.assert_allclose(out.log_probs[cut:], new[cut:], atol=2e-5)
        assert np.abs(old - new).max() > 0.1
        mixed += 0 < cut < 120
    assert mixed == 4
    assert reply(late).weight_spans == (WeightSpan("1", 0, 120),)


def test_weights_swapped_without_a_pause_drop_the_cache_too(engine):
    start = engine.stats.generation_tokens
    future = engine.submit(PROMPT, SamplingParams(max_tokens=140, seed=1, logprobs=1, ignore_eos=True))
    wait_for(lambda: engine.stats.generation_tokens >= start + 20)
    engine.swap_weights(params(1), "1").result(LIMIT)
    out = reply(future)
    cut = out.weight_spans[0].end
    assert out.weight_spans == (WeightSpan("default", 0, cut), WeightSpan("1", cut, 140))
    expected = token_log_probs(PROMPT, out.token_ids, seed=1)
    np.testing.assert_allclose(out.log_probs[cut:], expected[cut:], atol=2e-5)


def test_a_pause_does_not_change_the_tokens(engine):
    undisturbed = run(engine, max_tokens=140)
    start = engine.stats.generation_tokens
    future = engine.submit(PROMPT, SamplingParams(max_tokens=140, seed=1, logprobs=9, ignore_eos=True))
    wait_for(lambda: engine.stats.generation_tokens >= start + 20)
    engine.pause().result(LIMIT)
    assert 20 <= engine.stats.generation_tokens - start < 140
    engine.resume().result(LIMIT)
    out = reply(future)
    assert out.token_ids == undisturbed.token_ids
    np.testing.assert_allclose(out.log_probs, undisturbed.log_probs, atol=1e-5)


def test_weights_pushed_back_give_the_same_bits(engine):
    first = run(engine, max_tokens=50)
    engine.swap_weights(params(1), "1").result(LIMIT)
    assert run(engine, max_tokens=50).log_probs != first.log_probs
    engine.swap_weights(params(0), "2").result(LIMIT)
    again = run(engine, max_tokens=50)
    assert again.token_ids == first.token_ids
    assert again.log_probs == first.log_probs
    assert again.top_log_probs == first.top_log_probs
    assert again.weight_spans == (WeightSpan("2", 0, 50),)


def test_only_the_label_changes_without_weights(engine):
    engine.swap_weights(None, "7").result(LIMIT)
    assert engine.stats.version == "7"
    engine.swap_weights(None, None).result(LIMIT)
    assert engine.stats.version == "7"


def test_a_cancelled_request_frees_its_slot(engine):
    futures = [engine.submit(PROMPT, SamplingParams(max_tokens=150, ignore_eos=True)) for _ in range(5)]
    finished = engine.stats.finished
    for future in futures:
        assert future.cancel()
    out = run(engine, max_tokens=5)
    assert len(out.token_ids) == 5
    assert engine.stats.finished == finished + 1


def test_counters(engine):
    before = engine.stats
    run(engine, max_tokens=5)
    wait_for(lambda: engine.stats.running == 0)
    after = engine.stats
    assert after.generation_tokens - before.generation_tokens == 5
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT) - 1
    assert after.finished - before.finished == 1
    assert after.live_tokens == 0


def test_equal_prompts_are_forwarded_once(engine):
    engine.pause().result(LIMIT)
    before = engine.stats.prompt_tokens
    futures = [
        engine.submit(PROMPT, SamplingParams(max_tokens=4, seed=i, logprobs=1, ignore_eos=True)) for i in range(4)
    ]
    engine.resume().result(LIMIT)
    for future in futures:
        out = reply(future)
        np.testing.assert_allclose(out.log_probs, token_log_probs(PROMPT, out.token_ids), atol=2e-5)
    assert engine.stats.prompt_tokens - before == len(PROMPT) - 1


def test_stopping_fails_open_requests():
    with started_engine(EngineOptions(max_model_len=160, max_num_seqs=4)) as engine:
        engine.pause().result(LIMIT)
        future = engine.submit(PROMPT, SamplingParams(max_tokens=5))
    with pytest.raises(ServerError, match="the engine has stopped"):
        future.result(LIMIT)
    with pytest.raises(ServerError, match="the engine has stopped"):
        engine.submit(PROMPT, SamplingParams(max_tokens=5)).result(LIMIT)
    assert not engine.alive


def test_few_sizes_are_compiled():
    def generation(**kwargs):
        return Generation([1], SamplingParams(**kwargs), 5, frozenset())

    assert [num_top([generation(logprobs=n)], 1000) for n in (None, 0, 1, 2, 8, 9, 20)] == [1, 1, 1, 8, 8, 16, 24]
    assert num_top([generation(logprobs=9)], 12) == 12
    assert num_candidates([generation()], 1000) == 0
    assert num_candidates([generation(top_k=5), generation(top_k=100)], 1000) == 512
    assert num_candidates([generation(top_p=0.9)], 1000) == 1000
    assert num_candidates([generation(top_k=5, temperature=0.0)], 1000) == 0
