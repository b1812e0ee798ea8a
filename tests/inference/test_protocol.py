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


def test_a_completion_asks_for_ids_and_one_log_prob_less():
    params = SamplingParams(max_tokens=3, seed=7, logprobs=9, top_k=8, stop_token_ids=(4,))
    body = GenerateRequest("m", [1, 2], params).to_completion_json()
    assert (body["model"], body["prompt"], body["logprobs"], body["top_k"]) == ("m", [1, 2], 8, 8)
    assert body["return_token_ids"] is body["return_tokens_as_token_ids"] is True
    assert "logprobs" not in GenerateRequest("m", [1], SamplingParams(max_tokens=3)).to_completion_json()
    with pytest.raises(ProtocolError, match="needs max_tokens"):
        GenerateRequest("m", [1], SamplingParams()).to_completion_json()


def test_a_completion_is_read_by_ids():
    tables = {
        "tokens": ["token_id:207", "token_id:129"],
        "token_logprobs": [-5.5, -1.25],
        "top_logprobs": [{"token_id:207": -5.5, "token_id:140": -0.5}, {"token_id:129": -1.25, "token_id:7": -9999.0}],
    }
    body = {"choices": [{"token_ids": [207, 129], "finish_reason": "length", "logprobs": tables}]}
    assert GenerateResponse.from_completion_json(body) == GenerateResponse(
        [207, 129], "length", [-5.5, -1.25], [{207: -5.5, 140: -0.5}, {129: -1.25, 7: -math.inf}]
    )
    tables["top_logprobs"] = [{"\u0010": -5.5}, {}]
    with pytest.raises(ProtocolError):  # keys that are texts: the server did not understand the request
        GenerateResponse.from_completion_json(body)
