"""What a generation request may ask for: every rule, with vLLM's status codes and texts."""

from __future__ import annotations

import math
from typing import Any

from ajgrpo.inference.protocol import GenerateRequest, ProtocolError, SamplingParams
from ajgrpo.server.engine import Engine

KNOWN_FIELDS = frozenset({"model", "token_ids", "sampling_params", "request_id", "stream"})


class RequestError(Exception):
    """A request that is refused with an HTTP status."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError"):
        self.status, self.kind = status, kind
        super().__init__(message)


def read_generate(body: Any, engine: Engine, model_name: str) -> GenerateRequest:
    """The request in ``body``, checked against the model and the server's limits.

    Raises:
        RequestError: 404 for another model, 400 for anything else.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if unknown := sorted(set(body) - KNOWN_FIELDS):
        raise RequestError(f"unknown fields {unknown}; known are {sorted(KNOWN_FIELDS)}")
    if body.get("stream"):
        raise RequestError("streaming is not available")
    try:
        request = GenerateRequest.from_json(body)
    except (ProtocolError, TypeError) as exc:
        raise RequestError(str(exc)) from exc
    if request.model not in ("", model_name):
        raise RequestError(f"The model `{request.model}` does not exist.", 404, "NotFoundError")
    check_prompt(request.token_ids, engine)
    check_params(request.sampling_params, engine)
    return request


def check_prompt(token_ids: list[Any], engine: Engine) -> None:
    """The prompt's length and ids."""
    limit, vocab_size = engine.options.max_model_len, engine.config.vocab_size
    if not token_ids:
        raise RequestError("The prompt must not be empty")
    if not all(_is_int(token) for token in token_ids):
        raise RequestError("token_ids must be a list of integers")
    if len(token_ids) >= limit:
        raise RequestError(
            f"The prompt (length {len(token_ids)}) leaves no room for an output token: the maximum model length is "
            f"{limit}"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(f"Token id {wrong} is out of vocabulary")


def check_params(params: SamplingParams, engine: Engine) -> None:
    """The sampling parameters, one by one."""
    most, vocab_size = engine.options.max_logprobs, engine.config.vocab_size
    if _is_int(params.logprobs) and isinstance(params.logprobs, int) and params.logprobs > most:
        raise RequestError(f"Requested sample logprobs of {params.logprobs}, which is greater than max allowed: {most}")
    rules = (
        (_is_number(params.temperature) and params.temperature >= 0, "temperature", "a number ≥ 0"),
        (_is_number(params.top_p) and 0 < params.top_p <= 1, "top_p", "in (0, 1]"),
        (_is_int(params.top_k) and params.top_k >= -1, "top_k", "an integer ≥ 0 (0 and -1 switch it off)"),
        (_is_number(params.min_p) and 0 <= params.min_p <= 1, "min_p", "in [0, 1]"),
        (params.repetition_penalty == 1.0, "repetition_penalty", "1.0: penalties are not available"),
        (params.max_tokens is None or (_is_int(params.max_tokens) and params.max_tokens >= 1), "max_tokens", "≥ 1"),
        (params.seed is None or _is_int(params.seed), "seed", "an integer"),
        (params.logprobs is None or (_is_int(params.logprobs) and params.logprobs >= 0), "logprobs", "≥ 0"),
        (isinstance(params.ignore_eos, bool), "ignore_eos", "true or false"),
        (
            all(_is_int(token) and 0 <= token < vocab_size for token in params.stop_token_ids),
            "stop_token_ids",
            "a list of ids in the vocabulary",
        ),
    )
    for holds, name, allowed in rules:
        if not holds:
            raise RequestError(f"{name} must be {allowed}, got {getattr(params, name)!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
