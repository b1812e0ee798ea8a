"""The canary: does the server sample from the policy that the trainer thinks it pushed?

    push ──▶ sample a few prompts ──▶ the trainer's log-probs of the same tokens ──▶ within tolerance? ──▶ go on
                                                     │ no
                                                     ▼
               try the hypotheses in turn; the first that explains the server's numbers is named in the error

A wrong log-prob does not stop a run by itself: it only teaches the wrong thing. So it is looked for after the first
push and every ``canary_steps`` steps. The hypotheses, in the order in which they are tried:

1. *old weights*: the label of the weights, or the very reply of the last check, is still there.
2. *stale prefix cache*: once the cache is dropped the same request is answered rightly.
3. *raw log-probs*: the numbers are those before temperature and truncation.
4. *another temperature*: one factor on the logits explains them.
5. *tied head not refreshed*: they follow from the new model with the last check's embedding as its head.
6. *dtype*: they are off by no more than computing in another precision is.

Left out: correcting anything.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerError, ServerIncompatibleError
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse, SamplingParams
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import forward, head_kernel
from ajgrpo.ops.attention import TreeMask, tree_attention

TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Largest mean of |Δ log-prob| by the trainer's compute dtype. Two correct programs differ by about a tenth of this."""

PROMPT_TOKENS = 160
"""Longer than a block of any KV cache, so that a stale prefix cache is hit."""

COMPLETION_TOKENS = 16
TEXTS = (
    "Seven times eight is fifty-six, and nine times six is fifty-four. ",
    "The quick brown fox jumps over the lazy dog while it rains. ",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
)

EXPLAINED = 0.2
"""A hypothesis explains a mismatch when it leaves less than this share of it (or less than the tolerance)."""

DTYPE_FACTOR = 4.0
"""How many times the trainer's own float32-against-bfloat16 difference still counts as a matter of precision."""

CAUSES = {
    "old weights": "the last push did not take: the server still samples from older weights; restart it, and look for "
    "an error of its weight transfer in its log",
    "stale prefix cache": "the server reuses a prefix cache that older weights made; start it with "
    "--no-enable-prefix-caching, or find out who pauses it with clear_cache=false",
    "raw log-probs": "the server reports log-probs before temperature and truncation; start it with "
    "--logprobs-mode processed_logprobs",
    "another temperature": "the server samples at another temperature than the trainer assumes",
    "tied head not refreshed": "the server's output head is not that of the new embedding, which a tied model needs; "
    "install the server's plugin from the trainer's version of ajgrpo",
    "dtype": "server and trainer compute in different precision; start the server with the trainer's --dtype, or set "
    "bf16/fp16; canary_tolerance allows a known difference",
}
UNKNOWN = (
    "none of the known causes explains it: compare the server's model, revision and rope settings with the trainer's"
)


class Sampler(Protocol):
    """The part of ``ControlClient`` that is used."""

    def generate(self, request: GenerateRequest) -> GenerateResponse: ...

    def reset_prefix_cache(self) -> bool: ...


class Scorer(Protocol):
    """The trainer's own model."""

    def logits(self, tokens: list[int], start: int, dtype: str | None = None, head: Any = None) -> np.ndarray:
        """Logits [len(tokens) - start, V] (float32, before temperature) for the tokens from ``start`` on.

        ``dtype`` and ``head`` [V, H] replace those of the policy.
        """

    def head(self) -> np.ndarray | None:
        """A copy of the head of a tied model; None for an untied one."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """One request, its answer, and the trainer's logits [T, V] for the sampled tokens."""

    request: GenerateRequest
    response: GenerateResponse
    logits: np.ndarray

    def server(self) -> np.ndarray:
        """The server's log-probs of the sampled tokens [T]."""
        return np.asarray(self.response.log_probs, np.float64)

    def trainer(self, logits: np.ndarray, temperature: float, truncated: bool) -> np.ndarray:
        """Log-probs [T] of the sampled tokens, renormalised over the server's candidates where it truncates."""
        log_probs = log_softmax(logits / temperature)
        picked = log_probs[np.arange(len(self.response.token_ids)), self.response.token_ids]
        if truncated and self.response.top_log_probs is not None:
            sets = [[i for i, value in top.items() if np.isfinite(value)] for top in self.response.top_log_probs]
            picked = picked - [np.logaddexp.reduce(row[ids]) for row, ids in zip(log_probs, sets, strict=True)]
        return picked


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the last check leaves for the next: replies, and the head of a tied model."""

    replies: tuple[Reply, ...]
    head: np.ndarray | None


class Canary:
    """Checks a server against the trainer's own policy.

    Args:
        sampler: the server.
        model_name: its model's name.
        prompts: token ids.
        config: temperature, truncation, compute dtype and ``canary_tolerance``.
    """

    def __init__(self, sampler: Sampler, model_name: str, prompts: Sequence[list[int]], config: AsyncGRPOConfig):
        self._sampler, self._config = sampler, config
        asked = config.canary_tolerance
        self.tolerance = TOLERANCE[config.compute_dtype] if asked is None else asked
        params = SamplingParams(
            max_tokens=COMPLETION_TOKENS,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p or 0.0,
            seed=config.seed,
            logprobs=max(config.top_k, config.num_sampler_logprobs) + 1,
            ignore_eos=True,
        )
        self._requests = [GenerateRequest(model_name, list(prompt), params) for prompt in prompts]
        self._memory: Memory | None = None

    def check(self, scorer: Scorer, version: int) -> float:
        """Samples and compares; returns the mean |Δ log-prob|.

        Args:
            scorer: the policy that was pushed last.
            version: its version.

        Raises:
            ServerIncompatibleError: beyond tolerance, or weights of another version; with the most likely cause.
            ServerError: the server did not answer.
        """
        replies = tuple(self._ask(request, scorer) for request in self._requests)
        difference = self._difference(replies)
        labels = {span.version for reply in replies for span in reply.response.weight_spans}
        if difference > self.tolerance or not np.isfinite(difference) or labels - {str(version)}:
            cause = self._cause(replies, difference, labels - {str(version)}, scorer)
            raise ServerIncompatibleError(
                f"after push {version} the server's log-probs differ from the trainer's by {difference:.3g} on average "
                f"(allowed {self.tolerance:g}); most likely cause: {cause}"
            )
        self._memory = Memory(replies, scorer.head())
        return difference

    def _ask(self, request: GenerateRequest, scorer: Scorer) -> Reply:
        response = self._sampler.generate(request)
        if response.log_probs is None or not response.token_ids:
            raise ServerError("the canary's request came back without tokens or without log-probs")
        tokens = request.token_ids + response.token_ids
        return Reply(request, response, scorer.logits(tokens, len(request.token_ids)))

    def _difference(self, replies: Sequence[Reply], temperature: float | None = None, raw: bool = False) -> float:
        temperature = self._config.temperature if temperature is None else temperature
        truncated = self._config.truncates_sampling and not raw
        gaps = [reply.server() - reply.trainer(reply.logits, temperature, truncated) for reply in replies]
        return float(np.abs(np.concatenate(gaps)).mean())

    def _cause(self, replies: tuple[Reply, ...], difference: float, labels: set[str], scorer: Scorer) -> str:
        def explains(left: float) -> bool:
            return left < max(self.tolerance, EXPLAINED * difference)

        if labels:
            return f"old weights: {CAUSES['old weights']} (labels of its weights: {', '.join(sorted(labels))})"
        for name, test in (
            ("old weights", lambda: 0.0 if self._answers_as_before(replies) else np.inf),
            ("stale prefix cache", lambda: self._without_cache(scorer)),
            ("raw log-probs", lambda: self._difference(replies, temperature=1.0, raw=True)),
        ):
            if explains(test()):
                return f"{name}: {CAUSES[name]}"
        temperature = fitted_temperature(replies)
        if temperature is not None and explains(self._difference(replies, temperature)):
            values = f"{temperature:.3g}, not {self._config.temperature:g}"
            return f"another temperature: {CAUSES['another temperature']} ({values})"
        if explains(self._with_old_head(replies, scorer)):
            return f"tied head not refreshed: {CAUSES['tied head not refreshed']}"
        if difference < DTYPE_FACTOR * self._precision(replies, scorer):
            return f"dtype: {CAUSES['dtype']}"
        return UNKNOWN

    def _answers_as_before(self, replies: Sequence[Reply]) -> bool:
        """Whether every request of the last check is answered to the bit as then, though the policy has changed."""
        if self._memory is None:
            return False
        before = self._memory.replies
        return all(
            old.response.token_ids == new.response.token_ids
            and np.abs(old.server() - new.server()).max() < 1e-6  # float32 on the wire
            for old, new in zip(before, replies, strict=True)
        )

    def _without_cache(self, scorer: Scorer) -> float:
        if not self._sampler.reset_prefix_cache():
            return np.inf
        return self._difference([self._ask(request, scorer) for request in self._requests])

    def _with_old_head(self, replies: Sequence[Reply], scorer: Scorer) -> float:
        if self._memory is None or self._memory.head is None:
            return np.inf
        return self._difference([rescored(reply, scorer, head=self._memory.head) for reply in replies])

    def _precision(self, replies: Sequence[Reply], scorer: Scorer) -> float:
        """Mean |Δ log-prob| between the trainer's own float32 and bfloat16."""
        both = [[rescored(reply, scorer, dtype=dtype) for reply in replies] for dtype in ("float32", "bfloat16")]
        temperature = self._config.temperature
        gaps = [
            one.trainer(one.logits, temperature, False) - other.trainer(other.logits, temperature, False)
            for one, other in zip(*both, strict=True)
        ]
        return float(np.abs(np.concatenate(gaps)).mean())


def rescored(reply: Reply, scorer: Scorer, **changes: Any) -> Reply:
    """The reply with the trainer's logits computed another way."""
    tokens = reply.request.token_ids + reply.response.token_ids
    return dataclasses.replace(reply, logits=scorer.logits(tokens, len(reply.request.token_ids), **changes))


def fitted_temperature(replies: Sequence[Reply]) -> float | None:
    """The temperature that the server's own top log-probs follow from the trainer's logits by; None if none fits.

    Differences of log-probs at one position are differences of logits over the temperature, whatever the truncation;
    the fit is the least-squares slope through the origin.
    """
    numerator = denominator = 0.0
    for reply in replies:
        for row, top in zip(reply.logits, reply.response.top_log_probs or (), strict=False):
            ids = [token for token, value in top.items() if np.isfinite(value)]
            ours, theirs = row[ids], np.array([top[token] for token in ids])
            ours, theirs = ours - ours.mean(), theirs - theirs.mean()
            numerator += float(ours @ theirs)
            denominator += float(ours @ ours)
    return denominator / numerator if numerator > 0 else None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


def canary_prompts(tokenizer: Any, max_model_len: int) -> list[list[int]]:
    """Token ids of ``TEXTS``, each repeated up to ``PROMPT_TOKENS``, as far as the server's context allows."""
    length = max(1, min(PROMPT_TOKENS, max_model_len - COMPLETION_TOKENS))
    prompts = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append((ids * (length // max(len(ids), 1) + 1))[:length])
    return prompts


class ModelScorer:
    """The trainer's policy as a ``Scorer``: a plain forward pass, compiled once per sequence length and dtype."""

    def __init__(self, config: ModelConfig, params: Any, compute_dtype: str):
        self._config, self._params, self._dtype = config, params, compute_dtype

    def logits(self, tokens: list[int], start: int, dtype: str | None = None, head: Any = None) -> np.ndarray:
        """See ``Scorer``."""
        compute = _forward(self._config, dtype or self._dtype)
        kernel = None if head is None else jnp.asarray(head)
        with_prompt = compute(self._params, jnp.asarray(tokens, jnp.int32), kernel)
        return np.asarray(with_prompt)[start - 1 : -1]

    def head(self) -> np.ndarray | None:
        """See ``Scorer``."""
        tied = self._config.tie_word_embeddings
        return np.array(head_kernel(self._config, self._params)) if tied else None


@functools.lru_cache(maxsize=8)
def _forward(config: ModelConfig, dtype: str) -> Any:
    @jax.jit
    def logits(params: Any, tokens: jax.Array, head: jax.Array | None) -> jax.Array:
        length = tokens.shape[0]
        positions = jnp.arange(length, dtype=jnp.int32)
        mask = TreeMask(jnp.full(length, length, jnp.int32), positions)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
            options: dict[str, Any] = {
                "scale": config.attention_scale,
                "window": window,
                "softcap": config.attn_softcap,
            }
            return tree_attention(q, k, v, mask, implementation="dense", **options), state

        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        hidden, _ = forward(config, cast, tokens, positions, attend, compute_dtype=dtype)
        kernel = head_kernel(config, cast) if head is None else head.astype(dtype)
        table = jnp.einsum("th,vh->tv", hidden, kernel, preferred_element_type=jnp.float32)
        cap = config.logit_softcap
        return table if cap is None else cap * jnp.tanh(table / cap)

    return logits
