"""The HTTP clients of the rollout server: one for generation (async), one for control (sync).

    rollout loop ── ServerClient ──▶ POST /inference/v1/generate or /v1/completions, GET /metrics
                                                                                   kept-alive, retried, counted
    trainer ─────── ControlClient ─▶ everything else                               one connection a call, never retried

Every foreign error becomes one of ``ajgrpo.errors`` in ``map_error``, and the only decision to retry is
``is_retryable``. Control calls keep no connection alive: after an HTTP 500 a vLLM server closes the connection without
saying so, and the next request on it would fail. They are not retried either, because a weight update is a sequence
of steps in which a repeated call means something else.

Left out: streaming, text prompts, authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

import httpx

from ajgrpo.errors import (
    ServerError,
    ServerIncompatibleError,
    ServerResponseError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from ajgrpo.inference import protocol
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse, ProtocolError

CONNECT_TIMEOUT_S = 10.0
"""Opening a connection is quick or hopeless; the long bound is for the reply."""

RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Replies that another attempt may turn into a success. A 500 is among them: the server may be restarting."""

MAX_ATTEMPTS = 8
BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0

MAX_ACKNOWLEDGEMENT_BYTES = 4096
"""Replies to control calls are shorter, replies with samples mostly longer: those are not decoded twice."""

OLDEST_VERSION = (0, 28)
KNOWN_VERSIONS = "ajgrpo speaks the API of vLLM 0.28 to 0.32"
DEV_MODE_HINT = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
SCALE_OUT_HINT = "start vLLM with --enable-scale-out"

logger = logging.getLogger(__name__)

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EndpointMissingError(ServerIncompatibleError):
    """The server does not offer an endpoint for which there is a substitute."""


class ServerClient:
    """Sends generations, many at a time, and repeats those that fail for a passing reason.

    Args:
        base_url: for example ``"http://localhost:8000"``.
        timeout_s: bound on one attempt, from sending to the last byte of the reply; a pause of the server counts.
        transport: replaces the network in tests.
        max_attempts: attempts per request, the first included.
        backoff_s: mean wait before the second attempt; doubles with each further one, up to ``MAX_BACKOFF_S``.

    Attributes:
        retry_count: attempts beyond the first, over all requests so far.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_s: float = BACKOFF_S,
    ):
        self._timeout_s, self._max_attempts, self._backoff_s = timeout_s, max_attempts, backoff_s
        self._path = protocol.GENERATE
        self.retry_count = 0
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            timeout=_timeout(timeout_s),
            transport=transport or SpreadTransport(),
        )

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Samples one completion; the seed in the request makes a repeated attempt draw the same tokens.

        A server that does not offer ``/inference/v1/generate`` is asked through ``/v1/completions`` from then on. Such
        replies say neither policy versions nor candidate sets.

        Raises:
            ServerResponseError: a reply that no repetition would change, or the last attempt's.
            ServerUnreachableError, ServerTimeoutError: the last attempt's.
            ServerIncompatibleError: the endpoint is missing or answers in another shape.
        """
        for attempt in range(1, self._max_attempts + 1):
            try:
                return await self._generate(request)
            except ServerError as exc:
                if attempt == self._max_attempts or not is_retryable(exc):
                    raise
            self.retry_count += 1
            await asyncio.sleep(backoff(attempt, self._backoff_s))
        raise AssertionError("the last attempt returns or raises")

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        if self._path == protocol.GENERATE:
            try:
                return _read_generation(await self._call("POST", protocol.GENERATE, request.to_json()))
            except EndpointMissingError as exc:
                logger.warning("%s; using %s, which does not tell policy versions", exc, protocol.COMPLETIONS)
                self._path = protocol.COMPLETIONS
        return _read_completion(await self._call("POST", protocol.COMPLETIONS, request.to_completion_json()))

    async def metrics_text(self) -> str:
        """The server's ``/metrics``, one attempt; see ``parse_metrics``."""
        return (await self._call("GET", protocol.METRICS, None)).text

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        label = f"{method} {path}"
        try:
            response = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise map_error(exc, label, str(self._client.base_url), self._timeout_s) from exc
        return check_status(response, label)


class SpreadTransport(httpx.AsyncBaseTransport):
    """Spreads requests over several connection pools in turn.

    A pool of httpx looks at each of its connections for every request, so with hundreds of requests in flight a single
    pool spends most of a core on that.
    """

    def __init__(self, num_pools: int = 32):
        context = httpx.create_ssl_context()  # costly, so made once
        # The rollout loop bounds its own concurrency; a second bound here would only hide requests from it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=limits) for _ in range(num_pools)]
        self._turn = itertools.cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turn).handle_async_request(request)

    async def aclose(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # each is closed, whatever closing another raises
            for pool in self._pools:
                stack.push_async_callback(pool.aclose)


class ControlClient:
    """What the trainer asks of the server, one call at a time.

    Every method raises ``ServerUnreachableError``, ``ServerTimeoutError``, ``ServerResponseError`` or, when an endpoint
    is missing or answers in another shape, ``ServerIncompatibleError``. ``timeout_s`` of a method overrides the
    client's own.

    Args:
        base_url: for example ``"http://localhost:8000"``.
        timeout_s: bound on each call.
        transport: replaces the network in tests.
    """

    def __init__(self, base_url: str, *, timeout_s: float, transport: httpx.BaseTransport | None = None):
        self.base_url, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._client = httpx.Client(
            base_url=self.base_url,
            limits=httpx.Limits(max_keepalive_connections=0),
            transport=transport,
        )

    def close(self) -> None:
        """Closes the client."""
        self._client.close()

    def wait_until_ready(
        self, timeout_s: float, still_alive: Callable[[], bool] | None = None, interval_s: float = 0.2
    ) -> None:
        """Returns once ``/health`` answers 200.

        Args:
            timeout_s: bound on the wait.
            still_alive: asked between two attempts; False ends the wait at once (the server's process is gone).
            interval_s: time between two attempts.

        Raises:
            ServerTimeoutError: not ready within the bound.
            ServerUnreachableError: ``still_alive`` answered False.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.check_health(timeout_s=min(max(deadline - time.monotonic(), 0.1), 5.0))
                return
            except ServerError as exc:
                last = exc
            if still_alive is not None and not still_alive():
                raise ServerUnreachableError(f"the server at {self.base_url} ended before it was ready: {last}")
            if time.monotonic() + interval_s >= deadline:
                raise ServerTimeoutError(
                    f"the server at {self.base_url} was not ready within {timeout_s:g} s (vllm_server_timeout); "
                    f"the last attempt: {last}"
                ) from last
            time.sleep(interval_s)

    def check_health(self, *, timeout_s: float | None = None) -> None:
        """Returns when ``/health`` answers 200; a ``ServerError`` tells what it did instead."""
        self._call("GET", protocol.HEALTH, timeout_s=timeout_s)

    def models(self) -> tuple[str, int]:
        """Name and ``max_model_len`` (tokens) of the model that the server runs."""
        first = self._json("GET", protocol.MODELS, ("data",))["data"][0]
        return str(first["id"]), int(first["max_model_len"])

    def version(self) -> str:
        """The server's version."""
        return str(self._json("GET", protocol.VERSION, ("version",))["version"])

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Samples one completion, one attempt; ``/v1/completions`` where the server has nothing better."""
        try:
            return _read_generation(self._call("POST", protocol.GENERATE, request.to_json()))
        except EndpointMissingError:
            return _read_completion(self._call("POST", protocol.COMPLETIONS, request.to_completion_json()))

    def offers_generate(self) -> bool:
        """Whether the server has ``/inference/v1/generate``."""
        try:
            self._call("POST", protocol.GENERATE, {})
        except EndpointMissingError:
            return False
        except ServerResponseError:
            pass  # it is there, and does not like an empty request
        return True

    def tokenize(self, text: str, model: str) -> list[int] | None:
        """The server's token ids of a text without special tokens; None where the server has no such endpoint."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return [int(token) for token in self._json("POST", protocol.TOKENIZE, ("tokens",), body=body)["tokens"]]
        except ServerIncompatibleError:
            return None

    def reset_prefix_cache(self) -> bool:
        """Throws the server's prefix cache away; False where the server has no such endpoint."""
        try:
            self._call("POST", protocol.RESET_PREFIX_CACHE)
        except ServerIncompatibleError:
            return False
        return True

    def check_version(self) -> str:
        """The server's version, where it is new enough.

        Raises:
            ServerIncompatibleError: it is older than vLLM 0.28; names the version and what is missing.
        """
        version = self.version()
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST_VERSION:
            raise ServerIncompatibleError(
                f"the server at {self.base_url} is vLLM {version}, which has no weight updates that a trainer can "
                "follow (start_weight_update, finish_weight_update); install vLLM 0.28 or newer, best 0.32"
            )
        return version

    def server_info(self) -> dict[str, Any]:
        """The server's configuration, sections such as ``"model_config"`` by name."""
        body = self._json("GET", protocol.SERVER_INFO, ("vllm_config",), params={"config_format": "json"})
        return dict(body["vllm_config"])

    def nccl_version(self) -> str | None:
        """The server's NCCL library, for example ``"2.27.3"``; None where it does not say."""
        body = self._json("GET", protocol.SERVER_INFO, ("vllm_config",), params={"config_format": "json"})
        found = (body.get("system_env") or {}).get("nccl_version")
        return str(found) if found else None

    def metrics_text(self) -> str:
        """The server's ``/metrics``; see ``parse_metrics``."""
        return self._call("GET", protocol.METRICS).text

    def world_size(self) -> int:
        """Number of server workers that take part in a weight transfer."""
        return int(self._json("GET", protocol.WORLD_SIZE, ("world_size",))["world_size"])

    def is_paused(self, *, timeout_s: float | None = None) -> bool:
        """Whether generation is paused. A vLLM server answers only after a running weight update."""
        return bool(self._json("GET", protocol.IS_PAUSED, ("is_paused",), timeout_s=timeout_s)["is_paused"])

    def pause(self, *, timeout_s: float | None = None) -> None:
        """Stops generation and keeps the requests in flight, which are recomputed after ``resume``."""
        self._call("POST", protocol.PAUSE, params={"mode": "keep"}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float | None = None) -> None:
        """Goes on generating. Never call it between ``start_update`` and ``finish_update``."""
        self._call("POST", protocol.RESUME, timeout_s=timeout_s)

    def init_transfer(self, info: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Tells the server where its weights will come from (``init_info`` of the transfer backend)."""
        self._call("POST", protocol.INIT_TRANSFER, {"init_info": info}, timeout_s=timeout_s)

    def start_update(self, *, timeout_s: float | None = None) -> None:
        """Opens a weight update."""
        self._call("POST", protocol.START_UPDATE, timeout_s=timeout_s)

    def update_weights(self, info: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Lets the server receive the tensors of ``info``; returns when it has them."""
        self._call("POST", protocol.UPDATE_WEIGHTS, {"update_info": info}, timeout_s=timeout_s)

    def finish_update(self, version: str | None = None, *, timeout_s: float | None = None) -> None:
        """Closes the weight update; the new weights carry the label ``version`` (None keeps the old label)."""
        self._call("POST", protocol.FINISH_UPDATE, {"weight_version": version}, timeout_s=timeout_s)

    def _json(self, method: str, path: str, keys: tuple[str, ...], **kwargs: Any) -> dict[str, Any]:
        response = self._call(method, path, **kwargs)
        body = decode(response)
        if not isinstance(body, dict) or any(not _present(body.get(key)) for key in keys):
            raise ServerIncompatibleError(
                f"{method} {path}: expected the fields {list(keys)}, got {response.text[:200]!r}"
            )
        return body

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        label, bound = f"{method} {path}", self._timeout_s if timeout_s is None else timeout_s
        try:
            response = self._client.request(method, path, json=body, params=params, timeout=_timeout(bound))
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise map_error(exc, label, self.base_url, bound) from exc
        return check_status(response, label)


def is_retryable(error: ServerError) -> bool:
    """Whether a later attempt of the same generation may succeed."""
    if isinstance(error, ServerResponseError):
        return error.status in RETRYABLE_STATUS
    return isinstance(error, ServerUnreachableError | ServerTimeoutError)


def backoff(attempt: int, base_s: float) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 1): doubling, capped, ±50 % at random.

    The random part keeps requests that failed together from coming back together.
    """
    return min(base_s * 2 ** (attempt - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)


def map_error(exc: httpx.HTTPError | httpx.InvalidURL, request: str, base_url: str, timeout_s: float) -> ServerError:
    """The ajgrpo error for an error of httpx.

    Args:
        exc: what httpx raised.
        request: method and path.
        base_url: the server's address.
        timeout_s: the bound that was in force, for the message.
    """
    detail = str(exc) or type(exc).__name__
    if isinstance(exc, httpx.ConnectTimeout | httpx.ConnectError):
        return ServerUnreachableError(
            f"{request}: no server answers at {base_url} ({detail}); start it, or set vllm_server_base_url"
        )
    if isinstance(exc, httpx.TimeoutException):
        return ServerTimeoutError(f"{request}: no reply from {base_url} within {timeout_s:g} s (vllm_server_timeout)")
    if isinstance(exc, httpx.HTTPStatusError):
        return ServerResponseError(request, exc.response.status_code, exc.response.text)
    if isinstance(exc, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return ServerUnreachableError(f"{request}: {base_url!r} is not an http(s) address ({detail})")
    if isinstance(exc, httpx.TransportError):
        return ServerUnreachableError(f"{request}: the connection to {base_url} broke ({type(exc).__name__}: {detail})")
    return ServerError(f"{request}: the reply of {base_url} could not be read ({type(exc).__name__}: {detail})")


def check_status(response: httpx.Response, request: str) -> httpx.Response:
    """The response itself when it is a success.

    Raises:
        ServerIncompatibleError: the endpoint does not exist or is switched off; names the flag.
        ServerResponseError: any other HTTP error, or a success whose body tells of a failure; with the server's own
            message.
    """
    if response.is_success:
        return _check_body(response, request)
    body, path = decode(response), request.split(" ")[-1]
    message = protocol.error_message(body, response.text)
    # FastAPI and Starlette answer an unknown route with "Not Found"; a 404 about a model has another text.
    route_missing = response.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed")
    if path == protocol.GENERATE and (route_missing or response.status_code == 403):
        raise EndpointMissingError(f"{request} answered {response.status_code} ({message}); {SCALE_OUT_HINT}")
    if route_missing and path == protocol.COMPLETIONS:
        raise ServerIncompatibleError(f"{request} answered {response.status_code} ({message}); {SCALE_OUT_HINT}")
    if route_missing:
        raise ServerIncompatibleError(f"{request} answered {response.status_code} ({message}); {DEV_MODE_HINT}")
    raise ServerResponseError(request, response.status_code, message)


def _check_body(response: httpx.Response, request: str) -> httpx.Response:
    """Refuses a reply with status 200 whose body is an error."""
    if response.request.method == "POST" and len(response.content) <= MAX_ACKNOWLEDGEMENT_BYTES:
        body = decode(response)
        if isinstance(body, dict) and (body.get("error") or body.get("success") is False):
            raise ServerResponseError(request, response.status_code, protocol.error_message(body, response.text))
    return response


def decode(response: httpx.Response) -> Any:
    """The reply's JSON, or None where it is not JSON."""
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to ``{name: value}``, without labels.

    Values of several engines are summed, except names in ``_perc`` (a share), of which the largest counts. Numeric
    labels of ``…_info`` metrics become entries of their own:
    ``vllm:cache_config_info{num_gpu_blocks="4096"} 1.0`` → ``{"vllm:cache_config_info/num_gpu_blocks": 4096.0}``.
    Histogram buckets and lines that are not samples are left out.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None or match["name"].endswith("_bucket"):
            continue
        name, value = match["name"], _number(match["value"])
        samples = {name: value}
        if name.endswith("_info"):
            samples |= {f"{name}/{key}": _number(text) for key, text in _LABEL.findall(match["labels"] or "")}
        for key, number in samples.items():
            if number is None:
                continue
            if key not in values:
                values[key] = number
            else:
                values[key] = max(values[key], number) if key.endswith("_perc") else values[key] + number
    return values


def _read_generation(response: httpx.Response) -> GenerateResponse:
    try:
        return GenerateResponse.from_json(decode(response))
    except ProtocolError as exc:
        raise ServerIncompatibleError(f"POST {protocol.GENERATE}: {exc}; {KNOWN_VERSIONS}") from exc


def _read_completion(response: httpx.Response) -> GenerateResponse:
    try:
        return GenerateResponse.from_completion_json(decode(response))
    except ProtocolError as exc:
        raise ServerIncompatibleError(f"POST {protocol.COMPLETIONS}: {exc}; {KNOWN_VERSIONS}") from exc


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), pool=None)


def _present(value: Any) -> bool:
    return value is not None and value != []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
