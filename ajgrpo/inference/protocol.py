"""The HTTP API of the rollout server, described once: the client writes and the embedded server reads with it.

The shapes are those of vLLM 0.32 as seen on the wire. Token ids travel as integers, never as text: text keys collide
for tokens that do not decode. Log-probs of ``-inf`` travel as ``-9999.0``.

    POST /inference/v1/generate       GenerateRequest -> GenerateResponse
    POST /v1/completions              the same, for a vLLM without the above; names no policy versions
    GET  /health /v1/models /version /metrics /server_info /get_world_size /is_paused
    POST /pause?mode=keep  /resume
    POST /init_weight_transfer_engine {"init_info": {...}}
    POST /start_weight_update
    POST /update_weights              {"update_info": {"names", "dtype_names", "shapes"}}
    POST /finish_weight_update        {"weight_version": "7"}

Left out: text prompts, chat, streaming, several choices (``n > 1``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
HEALTH = "/health"
MODELS = "/v1/models"
VERSION = "/version"
METRICS = "/metrics"
SERVER_INFO = "/server_info"
WORLD_SIZE = "/get_world_size"
IS_PAUSED = "/is_paused"
PAUSE = "/pause"
RESUME = "/resume"
INIT_TRANSFER = "/init_weight_transfer_engine"
START_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"

MINUS_INFINITY = -9999.0
"""How ``-inf`` travels: JSON has no infinities."""


TOKEN_KEY = "token_id:"
"""Before a token's id where ``/v1/completions`` would have the token's text."""


class ProtocolError(ValueError):
    """A request or reply that does not have the documented shape."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample, under vLLM's names.

    Attributes:
        max_tokens: at most so many tokens; None: as many as the context holds.
        temperature: 0 is greedy.
        top_p, top_k, min_p: truncation; 1.0, 0 and 0.0 switch it off.
        repetition_penalty: 1.0 switches it off.
        seed: the request draws its own random numbers from this seed.
        logprobs: how many top log-probs to return for each token *including the sampled one*: ask for k + 1 to be
            sure of the k most likely tokens. None: no log-probs.
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: further token ids that end the generation.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All fields that are set, ready for ``json``: what is sampled never depends on the server's own defaults."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        fields["stop_token_ids"] = list(self.stop_token_ids)
        return fields

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> SamplingParams:
        """Reads the known fields; raises ProtocolError naming any other. ``n`` may be there, but must be 1."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = dict(body)
        if (choices := values.pop("n", 1)) != 1:
            raise ProtocolError(f"n must be 1, got {choices!r}: send one request for each completion")
        if unknown := sorted(set(values) - known):
            raise ProtocolError(f"unknown sampling parameters {unknown}; known are {sorted(known)}")
        values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One generation: token ids in."""

    model: str
    token_ids: list[int]
    sampling_params: SamplingParams

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "token_ids": self.token_ids,
            "sampling_params": self.sampling_params.to_json(),
        }

    def to_completion_json(self) -> dict[str, Any]:
        """The same request for ``/v1/completions``; raises ProtocolError without ``max_tokens``."""
        fields = self.sampling_params.to_json()
        if "max_tokens" not in fields:
            raise ProtocolError(f"{COMPLETIONS} needs max_tokens: its default is 16")
        if "logprobs" in fields:
            fields["logprobs"] -= 1  # here the sampled token is not counted
        own = {"model": self.model, "prompt": self.token_ids}
        return own | fields | {"return_token_ids": True, "return_tokens_as_token_ids": True}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> GenerateRequest:
        for name in ("token_ids", "sampling_params"):
            if name not in body:
                raise ProtocolError(f"missing field {name!r}")
        return cls(
            model=body.get("model") or "",
            token_ids=list(body["token_ids"]),
            sampling_params=SamplingParams.from_json(body["sampling_params"]),
        )


@dataclasses.dataclass(frozen=True)
class WeightSpan:
    """Output tokens ``start`` to ``end`` (exclusive) were sampled under weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class GenerateResponse:
    """The one choice of a generation: token ids out.

    Attributes:
        token_ids: sampled ids, an end-of-sequence token included.
        finish_reason: ``"stop"`` or ``"length"``.
        log_probs: log-prob of each sampled token; None if not asked for.
        top_log_probs: for each token id → log-prob of the sampled and the most likely tokens, -inf for tokens outside
            the truncation; None if not asked for.
        weight_spans: which weights sampled which tokens, in order, covering all tokens.
        sampling_mask: for each token the ids that it could have been, under truncation; None without truncation.
    """

    token_ids: list[int]
    finish_reason: str
    log_probs: list[float] | None = None
    top_log_probs: list[dict[int, float]] | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    sampling_mask: list[list[int]] | None = None

    def to_json(self, request_id: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
        logprobs = None
        if self.log_probs is not None and self.top_log_probs is not None:
            content = []
            for token, log_prob, top in zip(self.token_ids, self.log_probs, self.top_log_probs, strict=True):
                entries = [{"token_id": i, "logprob": _finite(value)} for i, value in top.items()]
                content.append({"token_id": token, "logprob": _finite(log_prob), "top_logprobs": entries})
            logprobs = {"content": content}
        return {
            "request_id": request_id,
            "model": model,
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "total_tokens": num_prompt_tokens + len(self.token_ids),
            },
            "choices": [
                {
                    "index": 0,
                    "finish_reason": self.finish_reason,
                    "token_ids": self.token_ids,
                    "sampling_mask": self.sampling_mask,
                    "weight_versions": [dataclasses.asdict(span) for span in self.weight_spans],
                    "logprobs": logprobs,
                }
            ],
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> GenerateResponse:
        """Reads the reply; raises ProtocolError when a field is missing or lengths disagree."""
        try:
            choice = body["choices"][0]
            token_ids = [int(token) for token in choice["token_ids"]]
            log_probs = top_log_probs = None
            if choice.get("logprobs") is not None:
                content = choice["logprobs"]["content"]
                if len(content) != len(token_ids):
                    raise ProtocolError(f"{len(content)} log-probs for {len(token_ids)} tokens")
                log_probs = [_infinite(item["logprob"]) for item in content]
                top_log_probs = [
                    {int(top["token_id"]): _infinite(top["logprob"]) for top in item["top_logprobs"]}
                    for item in content
                ]
            spans = tuple(
                WeightSpan(str(span["version"]), int(span["start"]), int(span["end"]))
                for span in choice.get("weight_versions") or ()
            )
            return cls(
                token_ids=token_ids,
                finish_reason=choice["finish_reason"],
                log_probs=log_probs,
                top_log_probs=top_log_probs,
                weight_spans=spans,
                sampling_mask=choice.get("sampling_mask"),
            )
        except (KeyError, IndexError, TypeError) as exc:
            raise ProtocolError(f"reply without the expected field: {exc!r}") from exc

    @classmethod
    def from_completion_json(cls, body: dict[str, Any]) -> GenerateResponse:
        """Reads a reply of ``/v1/completions``; raises ProtocolError when a field is missing or lengths disagree."""
        try:
            choice = body["choices"][0]
            token_ids = [int(token) for token in choice["token_ids"]]
            log_probs = top_log_probs = None
            if (tables := choice.get("logprobs")) is not None:
                log_probs = [_infinite(value) for value in tables["token_logprobs"]]
                top_log_probs = [
                    {int(key.removeprefix(TOKEN_KEY)): _infinite(value) for key, value in table.items()}
                    for table in tables["top_logprobs"]
                ]
                if not len(log_probs) == len(top_log_probs) == len(token_ids):
                    raise ProtocolError(f"{len(log_probs)} log-probs for {len(token_ids)} tokens")
            return cls(token_ids, choice["finish_reason"], log_probs, top_log_probs)
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise ProtocolError(f"reply without the expected field: {exc!r}") from exc


def error_body(message: str, status: int, kind: str | None = None) -> dict[str, Any]:
    """The body of an HTTP error, as vLLM writes it."""
    kind = kind or ("BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_message(body: Any, text: str) -> str:
    """The server's own message out of an error reply: ``body`` is the decoded JSON or None, ``text`` the raw reply."""
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return text.strip() or "(empty reply)"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else MINUS_INFINITY


def _infinite(value: float | None) -> float:
    return -math.inf if value is None or value <= MINUS_INFINITY else float(value)
