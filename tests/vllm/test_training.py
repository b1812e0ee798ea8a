"""The whole product against a real vLLM, and the ways of generation."""

from __future__ import annotations

import pathlib

import pytest

from ajgrpo import doctor
from ajgrpo.inference.client import ControlClient
from ajgrpo.loggers import read_metrics
from tests.integration.test_training import make_trainer
from tests.vllm.policies import PROMPT, TIED, generate, request
from tests.vllm.server import MODEL_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LOGP_BOUND = 1e-3
"""Float32 on both sides differs by about 1e-5; weights one step old, by more than this bound."""


def test_the_quickstarts_model_trains_and_agrees_with_the_server_after_every_push(server, tmp_path: pathlib.Path):
    result = make_trainer(
        tmp_path, max_steps=8, vllm_server_base_url=server.base_url, canary_steps=2, max_staleness=1
    ).train()
    assert result.global_step == 8
    lines = read_metrics(tmp_path / "metrics.jsonl")
    measured = [line.get("sampling/on_policy_logp_difference/max") for line in lines]
    measured = [value for value in measured if value is not None]
    assert len(measured) >= 4
    assert max(measured) < LOGP_BOUND


def test_top_k_and_temperature_are_those_of_the_server(server, tmp_path: pathlib.Path):
    options = {"top_k": 12, "top_p": 0.9, "temperature": 0.8, "canary_steps": 1}
    make_trainer(tmp_path, max_steps=3, vllm_server_base_url=server.base_url, **options).train()


def test_the_doctor_finds_a_real_server_healthy(server, capsys):
    flags = ["--config", "configs/quickstart.yaml", "--vllm_server_base_url", server.base_url]
    assert doctor.main(flags) == 0
    assert "failed" not in capsys.readouterr().out


def test_a_server_without_the_generate_endpoint_is_used_through_completions(servers, tmp_path: pathlib.Path, capsys):
    server = servers.get("completions", TIED.directory, scale_out=False)
    control = ControlClient(server.base_url, timeout_s=60)
    assert not control.offers_generate()
    with TIED.transfer(control) as transfer:
        TIED.push(transfer, 1)
    reply = generate(server.base_url, request(24, logprobs=9))
    expected = TIED.log_probs(1, PROMPT, reply.token_ids)
    assert abs(expected - reply.log_probs).max() < 2e-5
    assert all(8 <= len(top) <= 9 for top in reply.top_log_probs)
    assert reply.weight_spans == ()
    assert control.models()[0] == MODEL_NAME
    make_trainer(tmp_path, max_steps=3, vllm_server_base_url=server.base_url).train()
    assert doctor.main(["--config", "configs/quickstart.yaml", "--vllm_server_base_url", server.base_url]) == 0
    assert "--enable-scale-out" in capsys.readouterr().out.replace("\n", "")
    control.close()
