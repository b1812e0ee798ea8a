"""Each hypothesis is provoked with a fake server, and must be the one that is named."""

import dataclasses

import jax
import numpy as np
import pytest

from ajgrpo.canary import Canary, ModelScorer, canary_prompts, fitted_temperature, log_softmax
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerError, ServerIncompatibleError
from ajgrpo.inference.protocol import GenerateResponse, WeightSpan
from tests.server import models

PROMPTS = [[5, 17, 20, 33], [90, 61, 8]]


def params(seed):
    return models.params(seed)


class FakeServer:
    """Draws from a policy of its own. The attributes say in what it differs from a good server."""

    def __init__(self, seed=0):
        self.params, self.head = params(seed), None
        self.version, self.temperature, self.raw, self.dtype = "0", None, False, "float32"
        self.cached_params = None
        self.has_cache_endpoint = True

    def generate(self, request):
        sampling = request.sampling_params
        scorer = ModelScorer(models.CONFIG, self.cached_params or self.params, "float32")
        temperature = self.temperature or sampling.temperature
        rng = np.random.default_rng([sampling.seed, *request.token_ids])
        tokens, log_probs, tops = list(request.token_ids), [], []
        for _ in range(sampling.max_tokens):
            logits = scorer.logits([*tokens, 0], len(tokens), dtype=self.dtype, head=self.head)[0]
            processed = log_softmax(logits / temperature)
            if sampling.top_k:
                kept = np.argsort(processed)[-sampling.top_k :]
                inside = np.full_like(processed, -np.inf)
                inside[kept] = processed[kept] - np.logaddexp.reduce(processed[kept])
                processed = inside
            chosen = int(rng.choice(len(processed), p=np.exp(processed) / np.exp(processed).sum()))
            reported = log_softmax(logits) if self.raw else processed
            most = np.argsort(reported)[::-1][: sampling.logprobs - 1]
            tops.append({chosen: float(reported[chosen])} | {int(i): float(reported[i]) for i in most})
            log_probs.append(float(reported[chosen]))
            tokens.append(chosen)
        output = tokens[len(request.token_ids) :]
        spans = (WeightSpan(self.version, 0, len(output)),) if self.version is not None else ()
        return GenerateResponse(output, "length", log_probs, tops, spans)

    def reset_prefix_cache(self):
        if self.has_cache_endpoint:
            self.cached_params = None
        return self.has_cache_endpoint


def canary(server, **options):
    return Canary(server, "m", PROMPTS, AsyncGRPOConfig(**{"bf16": False, **options}))


def scorer(seed=0):
    return ModelScorer(models.CONFIG, params(seed), "float32")


def cause(check, policy, version=1):
    with pytest.raises(ServerIncompatibleError) as caught:
        check.check(policy, version)
    return str(caught.value).split("most likely cause: ")[1].split(":")[0]


def test_a_good_server_passes_at_any_temperature_and_truncation():
    for options in ({}, {"temperature": 0.7}, {"top_k": 12, "temperature": 1.3, "num_sampler_logprobs": 4}):
        assert canary(FakeServer(), **options).check(scorer(), 0) < 1e-5


def test_the_scorer_agrees_with_the_reference():
    tokens = PROMPTS[0] + [4, 9, 2]
    expected = models.reference(tokens)[3:6]
    np.testing.assert_allclose(log_softmax(scorer().logits(tokens, 4)), expected, atol=1e-5)


def test_old_weights_by_their_label():
    assert cause(canary(FakeServer()), scorer(), version=1) == "old weights"
    server = FakeServer(seed=1)  # even when the numbers fit
    with pytest.raises(ServerIncompatibleError, match="labels of its weights: 0"):
        canary(server).check(scorer(1), 3)


@pytest.mark.parametrize("version", ["1", None])
def test_old_weights_by_their_answers(version):
    server = FakeServer()
    check = canary(server)
    check.check(scorer(), 0)
    server.version = version
    assert cause(check, scorer(1)) == "old weights"


def test_a_stale_prefix_cache():
    server = FakeServer(seed=1)
    server.version, server.cached_params = "1", params(2)
    assert cause(canary(server), scorer(1)) == "stale prefix cache"
    server.cached_params, server.has_cache_endpoint = params(2), False
    assert cause(canary(server), scorer(1)).startswith("none of the known causes")


@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"top_k": 12}])
def test_raw_log_probs(options):
    server = FakeServer()
    server.raw = True
    assert cause(canary(server, **options), scorer(), 0) == "raw log-probs"


def test_another_temperature():
    server = FakeServer()
    server.temperature = 0.8
    with pytest.raises(ServerIncompatibleError, match=r"another temperature: .*\(0.8, not 1\)"):
        canary(server).check(scorer(), 0)


def test_a_tied_head_that_was_not_refreshed():
    server = FakeServer()
    check = canary(server)
    check.check(scorer(), 0)
    server.params, server.version, server.head = params(1), "1", np.asarray(params(0)["embed"]["embedding"])
    assert cause(check, scorer(1)) == "tied head not refreshed"


def test_dtype():
    server = FakeServer()
    server.dtype = "bfloat16"
    assert cause(canary(server), scorer(), 0) == "dtype"
    assert canary(server, canary_tolerance=0.5).check(scorer(), 0) > 1e-3
    assert canary(server, bf16=True).check(ModelScorer(models.CONFIG, params(0), "bfloat16"), 0) < 0.05


def test_what_nothing_explains_is_said_to_be_so():
    noisy = jax.tree.map(lambda leaf: leaf * 1.3, params(0))
    server = FakeServer()
    server.params = noisy
    assert cause(canary(server), scorer(), 0).startswith("none of the known causes")


def test_a_reply_without_log_probs_is_an_error():
    class Silent(FakeServer):
        def generate(self, request):
            return dataclasses.replace(super().generate(request), log_probs=None)

    with pytest.raises(ServerError, match="without log-probs"):
        canary(Silent()).check(scorer(), 0)


def test_the_fitted_temperature_needs_something_to_fit():
    assert fitted_temperature([]) is None


def test_prompts_fill_the_context_and_no_more():
    class Tokenizer:
        def encode(self, text, add_special_tokens):
            return list(text.encode())

    assert [len(prompt) for prompt in canary_prompts(Tokenizer(), 4096)] == [160, 160, 160]
    assert [len(prompt) for prompt in canary_prompts(Tokenizer(), 64)] == [48, 48, 48]
