import math

import pytest

from ajgrpo.inference.protocol import (
    GenerateRequest,
    GenerateResponse,
    ProtocolError,
    SamplingParams,
    WeightSpan,
    error_body,
    error_message,
)


def test_request_survives_the_wire_and_states_every_sampling_default():
    request = GenerateRequest("m", [1, 2], SamplingParams(max_tokens=3, seed=7, logprobs=9, stop_token_ids=(4,)))
    body = request.to_json()
    assert GenerateRequest.from_json(body) == request
    # A server must not fill these in from the model's generation_config.json.
    assert body["sampling_params"] == {
        "max_tokens": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 7,
        "logprobs": 9,
        "ignore_eos": False,
        "stop_token_ids": [4],
    }


def test_one_choice_is_accepted_more_are_not():
    assert SamplingParams.from_json({"n": 1}) == SamplingParams()
    with pytest.raises(ProtocolError, match="n must be 1, got 2"):
        SamplingParams.from_json({"n": 2})
    with pytest.raises(ProtocolError, match=r"unknown sampling parameters \['temprature'\]"):
        SamplingParams.from_json({"temprature": 1.0})


def test_response_survives_the_wire_with_infinities():
    response = GenerateResponse(
        token_ids=[5, 9],
        finish_reason="stop",
        log_probs=[-0.5, -1.25],
        top_log_probs=[{5: -0.5, 6: -math.inf}, {9: -1.25}],
        weight_spans=(WeightSpan("3", 0, 1), WeightSpan("4", 1, 2)),
        sampling_mask=[[5], [9, 2]],
    )
    body = response.to_json("id", "m", 3)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1] == {"token_id": 6, "logprob": -9999.0}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert GenerateResponse.from_json(body) == response


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"choices": []},
        {"choices": [{"token_ids": [1]}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": []}}]},
    ],
)
def test_a_reply_of_another_shape_is_named(body):
    with pytest.raises(ProtocolError):
        GenerateResponse.from_json(body)


def test_error_messages_of_vllm_fastapi_and_plain_text():
    assert error_message(error_body("no", 400), "") == "no"
    assert error_message({"detail": "Not Found"}, "") == "Not Found"
    assert error_message(None, " oops\n") == "oops"
    assert error_message(None, "") == "(empty reply)"
