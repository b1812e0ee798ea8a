import asyncio
import contextlib
import inspect
import json
import socket

import httpx
import pytest

from ajgrpo.errors import (
    ServerError,
    ServerIncompatibleError,
    ServerResponseError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from ajgrpo.inference import protocol
from ajgrpo.inference.client import (
    ControlClient,
    ServerClient,
    SpreadTransport,
    backoff,
    is_retryable,
    map_error,
    parse_metrics,
)
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse, SamplingParams

URL = "http://server:8000"
REQUEST = GenerateRequest("m", [1, 2], SamplingParams(max_tokens=1, seed=3))
REPLY = GenerateResponse([4], "length", [-0.5], [{4: -0.5}])


def generation(*answers):
    """Runs one generation against a transport that gives the answers in turn; returns (result, client, bodies)."""
    bodies, rest = [], list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        answer = rest.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run():
        client = ServerClient(URL, timeout_s=5, transport=httpx.MockTransport(handle), max_attempts=3, backoff_s=0.0)
        try:
            return await client.generate(REQUEST), client
        except ServerError as exc:
            return exc, client
        finally:
            await client.close()

    return *asyncio.run(run()), bodies


def ok() -> httpx.Response:
    return httpx.Response(200, json=REPLY.to_json("id", "m", 2))


def failed(status: int, message: str = "boom") -> httpx.Response:
    return httpx.Response(status, json=protocol.error_body(message, status))


def control(handler, **kwargs) -> ControlClient:
    return ControlClient(URL, timeout_s=5, transport=httpx.MockTransport(handler), **kwargs)


def test_generation_is_repeated_with_the_same_body_and_counted():
    result, client, bodies = generation(httpx.ConnectError("refused"), failed(503), ok())
    assert result == REPLY
    assert client.retry_count == 2
    assert bodies == [REQUEST.to_json()] * 3


def test_the_last_attempt_decides():
    result, client, bodies = generation(failed(500, "a"), httpx.ReadTimeout("slow"), failed(502, "c"))
    assert isinstance(result, ServerResponseError)
    assert (result.status, result.message, result.request) == (502, "c", "POST /inference/v1/generate")
    assert (client.retry_count, len(bodies)) == (2, 3)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (failed(400, "Token id 9 is out of vocabulary"), ServerResponseError, "answered 400: Token id 9 is out"),
        (failed(404, "The model `x` does not exist."), ServerResponseError, "answered 404: The model `x`"),
        (httpx.Response(200, json=protocol.error_body("no room", 500)), ServerResponseError, "answered 200: no room"),
        (httpx.Response(200, json={"success": False, "message": "no"}), ServerResponseError, "answered 200: no"),
        (httpx.Response(200, text="hello"), ServerIncompatibleError, "the API of vLLM 0.28"),
    ],
)
def test_errors_that_no_repetition_changes_are_raised_at_once(answer, kind, text):
    result, client, bodies = generation(answer, ok())
    assert type(result) is kind
    assert text in str(result)
    assert (client.retry_count, len(bodies)) == (0, 1)


COMPLETION = {
    "choices": [
        {
            "finish_reason": "length",
            "token_ids": [4],
            "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:4": -0.5}], "tokens": ["token_id:4"]},
        }
    ]
}


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_without_the_generate_endpoint_is_asked_for_completions(status, caplog):
    missing = httpx.Response(status, json={"detail": "Not Found"})
    result, client, bodies = generation(missing, failed(503), httpx.Response(200, json=COMPLETION))
    assert result == REPLY
    assert bodies == [REQUEST.to_json(), *[REQUEST.to_completion_json()] * 2]
    assert client.retry_count == 1
    assert "--enable-scale-out" in caplog.text
    result, _, _ = generation(missing, httpx.Response(404, json={"detail": "Not Found"}))
    assert type(result) is ServerIncompatibleError
    assert "POST /v1/completions answered 404 (Not Found); start vLLM with --enable-scale-out" in str(result)
    result, _, _ = generation(missing, httpx.Response(200, json={"choices": []}))
    assert "POST /v1/completions: reply without" in str(result)


def test_versions_before_0_28_are_refused():
    def client(version):
        return control(lambda request: httpx.Response(200, json={"version": version}))

    for version in ("0.28.0", "0.32.0+cpu", "1.0.0rc1", "dev"):
        assert client(version).check_version() == version
    for version in ("0.27.1", "0.9.2"):
        with pytest.raises(ServerIncompatibleError, match=rf"vLLM {version}.*start_weight_update.*install vLLM 0\.28"):
            client(version).check_version()


def test_what_is_retryable():
    retried = {status for status in range(400, 600) if is_retryable(ServerResponseError("r", status, "m"))}
    assert retried == {408, 425, 429, 500, 502, 503, 504}
    assert is_retryable(ServerTimeoutError("t"))
    assert is_retryable(ServerUnreachableError("u"))
    assert not is_retryable(ServerIncompatibleError("i"))
    assert not is_retryable(ServerError("e"))


def test_backoff_doubles_up_to_its_cap():
    means = [sum(backoff(attempt, 0.5) for _ in range(2000)) / 2000 for attempt in (1, 2, 3, 10)]
    assert means == pytest.approx([0.5, 1.0, 2.0, 15.0], rel=0.05)


def every_httpx_error() -> list[httpx.HTTPError | httpx.InvalidURL]:
    request, response = httpx.Request("GET", URL), httpx.Response(500, text="x")
    kinds = [
        kind
        for _, kind in inspect.getmembers(httpx, inspect.isclass)
        if issubclass(kind, httpx.HTTPError | httpx.InvalidURL)
    ]
    return [
        kind("m", request=request, response=response) if kind is httpx.HTTPStatusError else kind("m") for kind in kinds
    ]


def test_the_error_map_is_total():
    mapped = {type(exc).__name__: type(map_error(exc, "GET /x", URL, 7.0)) for exc in every_httpx_error()}
    assert len(mapped) > 15
    named = {name: kind for name, kind in mapped.items() if kind is not ServerError}
    timeouts = {"TimeoutException", "ReadTimeout", "WriteTimeout", "PoolTimeout"}
    assert {name for name, kind in named.items() if kind is ServerTimeoutError} == timeouts
    assert {name for name, kind in named.items() if kind is ServerResponseError} == {"HTTPStatusError"}
    unreachable = {"ConnectError", "ConnectTimeout", "ReadError", "WriteError", "RemoteProtocolError", "InvalidURL"}
    assert unreachable <= {name for name, kind in named.items() if kind is ServerUnreachableError}
    assert set(mapped) - set(named) == {"HTTPError", "RequestError", "DecodingError", "TooManyRedirects"}


def test_messages_name_address_bound_and_option():
    assert URL in str(map_error(httpx.ConnectError("refused"), "GET /x", URL, 7.0))
    assert "vllm_server_base_url" in str(map_error(httpx.ConnectError("refused"), "GET /x", URL, 7.0))
    assert "within 7 s (vllm_server_timeout)" in str(map_error(httpx.ReadTimeout("m"), "GET /x", URL, 7.0))


def test_control_calls_on_the_wire():
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, str(request.url).removeprefix(URL), json.loads(request.content or b"null")))
        replies = {
            "/v1/models": {"data": [{"id": "m", "max_model_len": 512}]},
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": {"model_config": {"max_model_len": 512}}},
            "/get_world_size": {"world_size": 2},
            "/is_paused": {"is_paused": False},
        }
        return httpx.Response(200, json=replies.get(request.url.path, {}))

    client = control(handle)
    assert client.models() == ("m", 512)
    assert client.version() == "0.32.0"
    assert client.server_info() == {"model_config": {"max_model_len": 512}}
    assert client.world_size() == 2
    assert client.is_paused() is False
    client.pause()
    client.init_transfer({"port": 1})
    client.start_update()
    client.update_weights({"names": []})
    client.finish_update("7")
    client.resume()
    client.close()
    assert seen == [
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/server_info?config_format=json", None),
        ("GET", "/get_world_size", None),
        ("GET", "/is_paused", None),
        ("POST", "/pause?mode=keep", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"port": 1}}),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"names": []}}),
        ("POST", "/finish_weight_update", {"weight_version": "7"}),
        ("POST", "/resume", None),
    ]


def test_control_errors():
    client = control(lambda request: httpx.Response(404, json={"detail": "Not Found"}))
    with pytest.raises(ServerIncompatibleError, match="VLLM_SERVER_DEV_MODE=1"):
        client.pause()
    client = control(lambda request: failed(500, "start_weight_update must be called"))
    with pytest.raises(ServerResponseError, match="POST /update_weights answered 500: start_weight_update must be"):
        client.update_weights({})
    client = control(lambda request: httpx.Response(200, json={"data": []}))
    with pytest.raises(ServerIncompatibleError, match="GET /v1/models"):
        client.models()


def test_waiting_for_readiness_goes_on_until_healthy():
    answers = [httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200)]

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    control(handle).wait_until_ready(5.0, interval_s=0.001)
    assert answers == []


def test_waiting_for_readiness_is_bounded_and_stops_when_the_process_is_gone():
    client = control(lambda request: httpx.Response(503, text="loading"))
    with pytest.raises(ServerTimeoutError, match=r"not ready within 0.05 s \(vllm_server_timeout\).*503: loading"):
        client.wait_until_ready(0.05, interval_s=0.01)
    with pytest.raises(ServerUnreachableError, match="ended before it was ready"):
        client.wait_until_ready(60.0, still_alive=lambda: False)


def test_a_server_that_accepts_and_never_answers_runs_into_the_bound():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            contextlib.closing(ControlClient(url, timeout_s=0.1)) as client,
            pytest.raises(ServerTimeoutError, match=r"GET /version: no reply from .* within 0.1 s"),
        ):
            client.version()


METRICS = """
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a,b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a,b} c"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:iteration_tokens_total_bucket{le="1.0"} 8.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",kv_cache_size_tokens="524288"} 1.0
process_open_fds 34.0
nonsense
vllm:bad NaNaN
"""


def test_metrics_are_summed_over_engines_and_info_labels_become_numbers():
    assert parse_metrics(METRICS) == {
        "vllm:num_requests_running": 7.0,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:cache_config_info": 1.0,
        "vllm:cache_config_info/block_size": 128.0,
        "vllm:cache_config_info/kv_cache_size_tokens": 524288.0,
        "process_open_fds": 34.0,
    }


def test_every_pool_is_closed_whatever_closing_another_raises():
    closed = []

    class Pool:
        async def aclose(self):
            closed.append(self)
            raise OSError("cannot close")

    transport = SpreadTransport(num_pools=3)
    transport._pools = [Pool(), Pool(), Pool()]
    with pytest.raises(OSError, match="cannot close"):
        asyncio.run(transport.aclose())
    assert len(set(map(id, closed))) == 3
