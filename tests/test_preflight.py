import copy
import json

import httpx
import pytest

from ajgrpo import preflight
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerIncompatibleError
from ajgrpo.inference.client import ControlClient
from ajgrpo.inference.protocol import GenerateResponse

NEEDS = preflight.Needs(logprobs=9, max_completion_length=100, compute_dtype="float32")
NOT_FOUND = object()


class Tokenizer:
    """Has what the checks use: its length and ``encode``."""

    def __len__(self):
        return 96

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]


TOKENIZER = Tokenizer()
GOOD = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "tiny", "max_model_len": 512}]},
    "/server_info": {
        "vllm_config": {
            "model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_logprobs": 20},
            "weight_transfer_config": {"backend": "host"},
            "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 1, "pipeline_parallel_size": 1},
            "lora_config": None,
        }
    },
    "/get_world_size": {"world_size": 2},
    "/is_paused": {"is_paused": False},
    "/metrics": "vllm:kv_cache_usage_perc 0.5\n",
    "/tokenize": {"tokens": TOKENIZER.encode(preflight.PROBE_TEXT, add_special_tokens=False)},
    "/inference/v1/generate": GenerateResponse([1], "length").to_json("i", "tiny", 2),
}


def found(needs=NEEDS, **changes):
    """Findings by title against a server with the good replies, some of them changed; also the generate requests."""
    replies, asked = copy.deepcopy(GOOD) | changes, []

    def handle(request):
        reply = replies[request.url.path]
        if request.url.path == "/inference/v1/generate":
            asked.append(json.loads(request.content))
        if reply is NOT_FOUND:
            return httpx.Response(404, json={"detail": "Not Found"})
        if isinstance(reply, httpx.Response):
            return reply
        return httpx.Response(200, **({"text": reply} if isinstance(reply, str) else {"json": reply}))

    control = ControlClient("http://server", timeout_s=5, transport=httpx.MockTransport(handle))
    return {finding.title: finding for finding in preflight.inspect(control, needs)}, asked


def server_info(section, **values):
    info = copy.deepcopy(GOOD["/server_info"])
    info["vllm_config"][section] = values
    return {"/server_info": info}


def test_a_good_server_passes():
    table, asked = found(preflight.Needs(9, 100, "float32", False, TOKENIZER, (2,)))
    assert {finding.status for finding in table.values()} == {"ok"}
    assert asked[-1]["token_ids"] == [2, 95]
    preflight.require(list(table.values()))


@pytest.mark.parametrize(
    ("title", "changes", "text"),
    [
        ("server", {"/version": {"version": "0.27.0"}}, "vLLM 0.27.0"),
        ("developer mode", {"/server_info": NOT_FOUND}, "VLLM_SERVER_DEV_MODE=1"),
        ("weight transfer", server_info("weight_transfer_config", backend="ipc"), '{"backend": "nccl"}'),
        ("log-probs", server_info("model_config", logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        ("number of log-probs", server_info("model_config", max_logprobs=8), "--max-logprobs 9"),
        ("context length", {"/v1/models": {"data": [{"id": "m", "max_model_len": 100}]}}, "--max-model-len"),
        ("workers", {"/get_world_size": {"world_size": 3}}, "counts 3 workers, its parallel configuration gives 2"),
        ("tokenizer", {"/tokenize": {"tokens": [1, 2]}}, "it runs another model"),
        ("vocabulary", {"/inference/v1/generate": httpx.Response(400, text="out of vocabulary")}, "[2, 95]"),
    ],
)
def test_what_training_needs_is_demanded_with_the_flag_to_set(title, changes, text):
    table, _ = found(preflight.Needs(9, 100, "float32", False, TOKENIZER, (2,)), **changes)
    assert table[title].status == "failed"
    assert text in table[title].detail
    with pytest.raises(ServerIncompatibleError) as caught:
        preflight.require(list(table.values()))
    assert f"- {title}: {table[title].detail}" in str(caught.value)


@pytest.mark.parametrize(
    ("title", "changes", "text"),
    [
        ("dtype", server_info("model_config", dtype="torch.bfloat16", logprobs_mode="processed_logprobs"), "bfloat16"),
        ("paused", {"/is_paused": {"is_paused": True}}, "the first push repairs"),
        ("generation endpoint", {"/inference/v1/generate": NOT_FOUND}, "--enable-scale-out"),
        ("metrics", {"/metrics": "x 1\n"}, "lacks vllm:kv_cache_usage_perc"),
    ],
)
def test_what_is_only_worse_is_a_warning(title, changes, text, caplog):
    table, _ = found(**changes)
    assert (table[title].status, text in table[title].detail) == ("warning", True)
    preflight.require(list(table.values()))
    assert text in caplog.text


def test_one_cause_is_reported_once_and_a_paused_server_is_not_asked_to_generate():
    table, asked = found(**{"/version": httpx.Response(503, text="loading")})
    assert [finding.title for finding in table.values() if finding.status == "failed"] == ["server"]
    assert table["dtype"].status == "not checked"
    table, asked = found(preflight.Needs(9, 100, "float32", False, TOKENIZER), **{"/is_paused": {"is_paused": True}})
    assert table["vocabulary"].status == "not checked"
    assert asked == [{}]


def test_all_failures_come_in_one_message():
    info = server_info("model_config", logprobs_mode="raw_logprobs", max_logprobs=1)
    table, _ = found(**info)
    with pytest.raises(ServerIncompatibleError, match=r"(?s)--logprobs-mode .*--max-logprobs 9"):
        preflight.require(list(table.values()))


def test_needs_follow_the_configuration():
    config = AsyncGRPOConfig(top_k=50, top_p=0.9, num_sampler_logprobs=8, bf16=False, max_completion_length=7)
    needs = preflight.needs_of(config, own_transfer=True)
    assert needs == preflight.Needs(51, 7, "float32", own_transfer=True)
    assert preflight.needs_of(AsyncGRPOConfig()).logprobs == 9
