"""The HTTP side of the embedded server: routes, nothing that computes.

Every handler reads the request with ``inference.protocol``, asks the engine or the weight session, and waits on a
future, so the event loop stays free while the engine's thread decodes.

Left out: text prompts and chat (the server has no tokenizer), streaming, LoRA, authentication.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ajgrpo.errors import ServerError
from ajgrpo.inference import protocol
from ajgrpo.server.engine import Engine
from ajgrpo.server.requests import RequestError, read_generate
from ajgrpo.server.updates import UpdateError, WeightUpdates
from ajgrpo.weights.base import BACKEND

API_VERSION = "0.32.0+ajgrpo"
"""The version of vLLM whose API is spoken."""

BLOCK_SIZE = 16
"""The unit in which ``/metrics`` states the size of the KV cache; the cache itself has no blocks."""

Handler = Callable[["Server", Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class Server:
    """What the handlers share."""

    engine: Engine
    model_name: str
    updates: WeightUpdates
    started: int


def build_app(engine: Engine, model_name: str) -> Starlette:
    """The ASGI application of a started engine."""
    server = Server(engine, model_name, WeightUpdates(engine), int(time.time()))
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", protocol.HEALTH, health),
        ("GET", protocol.MODELS, models),
        ("GET", protocol.VERSION, version),
        ("GET", protocol.METRICS, metrics),
        ("GET", protocol.SERVER_INFO, server_info),
        ("GET", protocol.WORLD_SIZE, world_size),
        ("GET", protocol.IS_PAUSED, is_paused),
        ("POST", protocol.GENERATE, generate),
        ("POST", protocol.PAUSE, pause),
        ("POST", protocol.RESUME, resume),
        ("POST", protocol.INIT_TRANSFER, init_transfer),
        ("POST", protocol.START_UPDATE, start_update),
        ("POST", protocol.UPDATE_WEIGHTS, update_weights),
        ("POST", protocol.FINISH_UPDATE, finish_update),
    ]
    routes = [
        Route(path, functools.partial(_answer, server, handler), methods=[method]) for method, path, handler in handlers
    ]
    return Starlette(routes=routes)


async def _answer(server: Server, handler: Handler, request: Request) -> Response:
    """Runs a handler; the one place where errors become replies."""
    try:
        return await handler(server, request)
    except RequestError as exc:
        return JSONResponse(protocol.error_body(str(exc), exc.status, exc.kind), exc.status)
    except (UpdateError, ServerError) as exc:
        return JSONResponse(protocol.error_body(str(exc), 500), 500)


async def generate(server: Server, request: Request) -> Response:
    """One completion; abandoned when the client hangs up."""
    wanted = read_generate(await _body(request), server.engine, server.model_name)
    future = asyncio.wrap_future(server.engine.submit(wanted.token_ids, wanted.sampling_params))
    hung_up = asyncio.ensure_future(_disconnected(request))
    waited_on: set[asyncio.Future[Any]] = {future, hung_up}
    try:
        await asyncio.wait(waited_on, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            return Response(status_code=499)  # nobody reads it
        reply = future.result().response()
    finally:
        future.cancel()
        hung_up.cancel()
    request_id = f"generate-tokens-{uuid.uuid4().hex[:16]}"
    return JSONResponse(reply.to_json(request_id, server.model_name, len(wanted.token_ids)))


async def health(server: Server, request: Request) -> Response:
    """200 while the engine runs."""
    return Response(status_code=200 if server.engine.alive else 503)


async def models(server: Server, request: Request) -> Response:
    """The one model."""
    card = {
        "id": server.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "ajgrpo",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.engine.options.max_model_len,
    }
    return JSONResponse({"object": "list", "data": [card]})


async def version(server: Server, request: Request) -> Response:
    return JSONResponse({"version": API_VERSION})


async def world_size(server: Server, request: Request) -> Response:
    return JSONResponse({"world_size": 1})


async def is_paused(server: Server, request: Request) -> Response:
    return JSONResponse({"is_paused": server.engine.stats.paused})


async def metrics(server: Server, request: Request) -> Response:
    """Prometheus text under vLLM's names."""
    stats, options = server.engine.stats, server.engine.options
    capacity = options.max_num_seqs * options.max_model_len
    labels = f'engine="0",model_name={json.dumps(server.model_name)}'
    cache = (
        f'block_size="{BLOCK_SIZE}",engine="0",kv_cache_max_concurrency="{options.max_num_seqs}",'
        f'kv_cache_size_tokens="{capacity}",num_gpu_blocks="{capacity // BLOCK_SIZE}"'
    )
    lines = []
    for name, kind, value in (
        ("num_requests_running", "gauge", stats.running),
        ("num_requests_waiting", "gauge", stats.waiting),
        ("kv_cache_usage_perc", "gauge", stats.live_tokens / capacity),
        ("num_preemptions_total", "counter", stats.preemptions),
        ("prompt_tokens_total", "counter", stats.prompt_tokens),
        ("generation_tokens_total", "counter", stats.generation_tokens),
        ("request_success_total", "counter", stats.finished),
    ):
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {float(value)}"]
    lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{cache}}} 1.0"]
    return PlainTextResponse("\n".join(lines) + "\n")


async def server_info(server: Server, request: Request) -> Response:
    """The part of vLLM's configuration that clients look at."""
    options = server.engine.options
    config = {
        "model_config": {
            "model": server.model_name,
            "dtype": f"torch.{options.dtype}",
            "max_model_len": options.max_model_len,
            "max_logprobs": options.max_logprobs,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": True,
            "served_model_name": server.model_name,
        },
        "cache_config": {
            "block_size": BLOCK_SIZE,
            "kv_cache_size_tokens": options.max_num_seqs * options.max_model_len,
            "kv_cache_max_concurrency": float(options.max_num_seqs),
        },
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "scheduler_config": {"max_num_seqs": options.max_num_seqs},
        "lora_config": None,
        "weight_transfer_config": {"backend": BACKEND},
    }
    return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})


async def pause(server: Server, request: Request) -> Response:
    """Only ``mode=keep``; the cache is always cleared (stale keys would outlive a weight update)."""
    mode = request.query_params.get("mode", "keep")
    if mode != "keep":
        raise RequestError(f"mode must be 'keep', got {mode!r}")
    await asyncio.wrap_future(server.engine.pause())
    return JSONResponse({"status": "paused"})


async def resume(server: Server, request: Request) -> Response:
    await asyncio.wrap_future(server.engine.resume())
    return JSONResponse({"status": "resumed"})


async def init_transfer(server: Server, request: Request) -> Response:
    info = await _field(request, "init_info")
    await asyncio.to_thread(server.updates.init, info)
    return JSONResponse({"message": "Weight transfer initialized"})


async def start_update(server: Server, request: Request) -> Response:
    await asyncio.to_thread(server.updates.start)
    return JSONResponse({"message": "Weight update started"})


async def update_weights(server: Server, request: Request) -> Response:
    info = await _field(request, "update_info")
    await asyncio.to_thread(server.updates.update, info)
    return JSONResponse({"message": "Weights updated"})


async def finish_update(server: Server, request: Request) -> Response:
    body = await _body(request) if await request.body() else {}
    label = body.get("weight_version") if isinstance(body, dict) else None
    done = await asyncio.to_thread(server.updates.finish, None if label is None else str(label))
    await asyncio.wrap_future(done)
    return JSONResponse({"message": "Weight update finished"})


async def _body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not JSON: {exc}") from exc


async def _field(request: Request, name: str) -> dict[str, Any]:
    body = await _body(request)
    if not isinstance(body, dict) or not isinstance(body.get(name), dict):
        raise RequestError(f"the body must hold the object {name!r}")
    return dict(body[name])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
