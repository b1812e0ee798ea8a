"""Models whose head is a tensor of its own, and a server with several workers."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from ajgrpo.errors import WeightTransferError
from ajgrpo.hf import io
from ajgrpo.inference.client import ControlClient
from tests.vllm.policies import TIED, Policies

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """The tiny model with a head of its own, unlike its embedding."""
    directory = tmp_path_factory.mktemp("untied")
    for path in TIED.directory.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
    config_json = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config_json))
    _, config = io.read_config(directory)
    params = dict(TIED.params(0))
    noise = jax.random.normal(jax.random.key(9), params["embed"]["embedding"].shape)
    params["head"] = {"kernel": (params["embed"]["embedding"] + 0.02 * noise)}
    io.save_checkpoint(directory, config_json, config, params, dtype="float32")
    return Policies(pathlib.Path(directory))


def test_an_untied_head_is_pushed(servers, untied):
    server = servers.get("untied", untied.directory)
    untied.assert_served(server.base_url, 0)
    control = ControlClient(server.base_url, timeout_s=60)
    with untied.transfer(control) as transfer:
        for number in (1, 0, 2):
            untied.push(transfer, number)
            untied.assert_served(server.base_url, number)
    control.close()


def test_tensor_parallel_workers_each_take_the_weights_and_report_failures(servers):
    server = servers.get(
        "parallel", TIED.directory, ["--tensor-parallel-size", "2"], {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )
    control = ControlClient(server.base_url, timeout_s=60)
    for shared_memory in (True, False):
        with TIED.transfer(control, shared_memory=shared_memory) as transfer:
            assert transfer.world_size == 2
            TIED.push(transfer, 1)
            TIED.assert_served(server.base_url, 1, "0")
            TIED.push(transfer, 0)
            TIED.assert_served(server.base_url, 0, "1")
    manifest = transfer._manifest
    with TIED.transfer(control, manifest=manifest[:-1]) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match=r"server worker \d: manifest does not cover the model"):
            transfer.send([(spec.name, np.zeros(spec.shape, np.float32)) for spec in manifest[:-1]])
        # vLLM's workers are still in step: the same trainer goes on.
        transfer._manifest = manifest
        TIED.push(transfer, 2)
        TIED.assert_served(server.base_url, 2)
    control.close()
