import asyncio
import contextlib

import httpx
import pytest

from ajgrpo.errors import ServerResponseError
from ajgrpo.inference import protocol
from ajgrpo.inference.client import ServerClient, parse_metrics
from ajgrpo.inference.protocol import GenerateRequest, SamplingParams
from ajgrpo.server.app import build_app
from tests.server.conftest import OPTIONS
from tests.server.models import PROMPT

PARAMS = {"max_tokens": 2, "seed": 1}


def post(engine, body) -> httpx.Response:
    """One generation request straight into the application."""

    async def run():
        transport = httpx.ASGITransport(build_app(engine, "tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(protocol.GENERATE, json=body)

    return asyncio.run(run())


def with_params(**changes) -> dict:
    return {"model": "tiny", "token_ids": PROMPT, "sampling_params": PARAMS | changes}


def test_many_generations_over_http(engine, base_url):
    async def run():
        client = ServerClient(base_url, timeout_s=60)
        params = [SamplingParams(max_tokens=8, seed=i, logprobs=3) for i in range(12)]
        replies = await asyncio.gather(*(client.generate(GenerateRequest("tiny", PROMPT, wanted)) for wanted in params))
        text = await client.metrics_text()
        await client.close()
        return replies, text, client.retry_count

    replies, text, retries = asyncio.run(run())
    assert retries == 0
    for i, reply in enumerate(replies):
        direct = engine.submit(PROMPT, SamplingParams(max_tokens=8, seed=i, logprobs=3)).result(60).response()
        assert reply.token_ids == direct.token_ids
        assert reply.log_probs == pytest.approx(direct.log_probs, abs=1e-5)
    assert parse_metrics(text)["vllm:generation_tokens_total"] >= sum(len(reply.token_ids) for reply in replies)


def test_the_reply_has_vllms_fields(engine):
    body = post(engine, with_params(logprobs=2, ignore_eos=True)).json()
    choice = body["choices"][0]
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 2}]
    for token, item in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert item["token_id"] == token
        assert item["top_logprobs"][0] == {"token_id": token, "logprob": item["logprob"]}


def test_log_probs_of_minus_infinity_travel_as_a_number(engine):
    body = post(engine, with_params(logprobs=4, top_k=2, ignore_eos=True)).json()
    for item, kept in zip(body["choices"][0]["logprobs"]["content"], body["choices"][0]["sampling_mask"], strict=True):
        values = {top["token_id"]: top["logprob"] for top in item["top_logprobs"]}
        assert sorted(token for token, value in values.items() if value != -9999.0) == sorted(kept)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (with_params(logprobs=21), 400, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        (with_params(n=2), 400, "n must be 1, got 2"),
        (with_params(repetition_penalty=1.1), 400, "repetition_penalty must be 1.0"),
        (with_params(presence_penalty=1.0), 400, "unknown sampling parameters ['presence_penalty']"),
        (with_params(temperature=-1), 400, "temperature must be a number ≥ 0, got -1"),
        (with_params(temperature="hot"), 400, "temperature must be a number"),
        (with_params(top_p=0), 400, "top_p must be in (0, 1], got 0"),
        (with_params(top_k=-2), 400, "top_k must be"),
        (with_params(min_p=2), 400, "min_p must be in [0, 1]"),
        (with_params(max_tokens=0), 400, "max_tokens must be ≥ 1, got 0"),
        (with_params(seed="x"), 400, "seed must be an integer"),
        (with_params(logprobs="x"), 400, "logprobs must be"),
        (with_params(stop_token_ids=[96]), 400, "stop_token_ids must be"),
        (with_params(stop_token_ids=7), 400, "not iterable"),
        (with_params() | {"token_ids": [96]}, 400, "Token id 96 is out of vocabulary"),
        (with_params() | {"token_ids": [-1]}, 400, "Token id -1 is out of vocabulary"),
        (with_params() | {"token_ids": []}, 400, "must not be empty"),
        (with_params() | {"token_ids": ["a"]}, 400, "list of integers"),
        (with_params() | {"token_ids": [1] * 160}, 400, "The prompt (length 160) leaves no room"),
        (with_params() | {"stream": True}, 400, "streaming is not available"),
        (with_params() | {"prompt": "x"}, 400, "unknown fields ['prompt']"),
        ({"model": "tiny", "token_ids": [1]}, 400, "missing field 'sampling_params'"),
        ([], 400, "must be a JSON object"),
        (with_params() | {"model": "other"}, 404, "The model `other` does not exist."),
    ],
)
def test_refused_requests(engine, body, status, text):
    reply = post(engine, body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert text in error["message"]
    assert error["code"] == status
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


def test_what_the_server_says_of_itself(control):
    assert control.models() == ("tiny", OPTIONS.max_model_len)
    assert control.version().startswith("0.32")
    assert control.world_size() == 1
    info = control.server_info()
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["max_model_len"] == OPTIONS.max_model_len
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["weight_transfer_config"] == {"backend": "host"}
    assert info["scheduler_config"]["max_num_seqs"] == OPTIONS.max_num_seqs
    metrics = parse_metrics(control.metrics_text())
    assert metrics["vllm:cache_config_info/kv_cache_size_tokens"] == 4 * 160
    assert metrics["vllm:kv_cache_usage_perc"] == metrics["vllm:num_requests_running"] == 0.0
    control.wait_until_ready(5.0)


def test_requests_wait_while_paused_and_are_answered_after(control, engine, base_url):
    control.pause()
    assert control.is_paused()

    async def run():
        client = ServerClient(base_url, timeout_s=60)
        request = GenerateRequest("tiny", PROMPT, SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
        pending = asyncio.ensure_future(client.generate(request))
        while parse_metrics(await client.metrics_text())["vllm:num_requests_waiting"] < 1:
            assert not pending.done()
        await asyncio.to_thread(control.resume)
        reply = await pending
        await client.close()
        return reply

    assert len(asyncio.run(run()).token_ids) == 3
    assert not control.is_paused()


def test_a_client_that_hangs_up_frees_its_slot(control, engine, base_url):
    control.pause()
    body = with_params(max_tokens=150, ignore_eos=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(base_url + protocol.GENERATE, json=body, timeout=0.5)
    while engine.stats.waiting:
        control.is_paused()
    control.resume()


def test_other_ways_to_pause_are_refused(control, base_url):
    with contextlib.closing(httpx.Client(base_url=base_url)) as client:
        assert client.post("/pause?mode=abort").status_code == 400
        assert client.post("/nothing").status_code == 404
        assert (
            client.post(protocol.GENERATE, content=b"{").json()["error"]["message"].startswith("the body is not JSON")
        )
    with pytest.raises(ServerResponseError, match="the body must hold the object 'update_info'"):
        control._call("POST", protocol.UPDATE_WEIGHTS, {})
