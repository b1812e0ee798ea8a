"""Policies of the tiny model, what the trainer's own forward pass says about them, and how they reach the server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.hf import io, mapping
from ajgrpo.inference.client import ControlClient, ServerClient
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse, SamplingParams
from ajgrpo.models import decoder
from ajgrpo.ops.attention import TreeMask, tree_attention
from ajgrpo.parts import model_source
from ajgrpo.weights.host import HostWeightTransfer
from tests.vllm.server import MODEL_NAME

LENGTH = 512
PROMPT = [5, 17, 200, 33, 90, 61, 8, 250, 77, 140]
TOLERANCE = 2e-5
"""Two float32 forward passes over four layers differ by a few 1e-6; a push that did not take, by more than 1e-2."""


class Policies:
    """Policy 0 is the directory's; policy n > 0 adds noise of its own to every tensor."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        _, self.config = io.read_config(directory)

    @functools.cached_property
    def _original(self) -> Any:
        return io.load_params(self.directory, self.config, dtype="float32")

    @functools.lru_cache  # noqa: B019  (instances live as long as the process)
    def params(self, number: int) -> Any:
        if number == 0:
            return self._original
        leaves, tree = jax.tree.flatten(self._original)
        keys = jax.random.split(jax.random.key(number), len(leaves))
        noisy = [leaf + 0.02 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy)

    @functools.cached_property
    def _forward(self) -> Any:
        config = self.config

        @jax.jit
        def forward(params, tokens, temperature):
            positions = jnp.arange(LENGTH, dtype=jnp.int32)
            mask = TreeMask(jnp.full(LENGTH, LENGTH, jnp.int32), positions)

            def attend(q, k, v, window, state):
                attended = tree_attention(q, k, v, mask, scale=config.attention_scale, implementation="dense")
                return attended, state

            hidden, _ = decoder.forward(config, params, tokens, positions, attend)
            return jax.nn.log_softmax(hidden @ decoder.head_kernel(config, params).T / temperature)

        return forward

    def log_probs(self, number: int, prompt: list[int], output: list[int], temperature: float = 1.0) -> np.ndarray:
        """The trainer's log-prob of each output token under policy ``number``: [len(output)]."""
        tokens = prompt + output
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        table = np.asarray(self._forward(self.params(number), padded, temperature))
        return table[np.arange(len(prompt) - 1, len(tokens) - 1), output]

    def assert_served(self, base_url: str, number: int, version: str | None = None) -> GenerateResponse:
        """The server samples from policy ``number``, and says that its version is ``version``."""
        reply = generate(base_url)
        expected = self.log_probs(number, PROMPT, reply.token_ids)
        np.testing.assert_allclose(reply.log_probs, expected, rtol=0, atol=TOLERANCE)
        if version is not None:
            assert [span.version for span in reply.weight_spans] == [version]
        return reply

    @contextlib.contextmanager
    def transfer(self, control: ControlClient, dtype: str = "float32", **kwargs: Any) -> Iterator[HostWeightTransfer]:
        manifest = kwargs.pop("manifest", None) or mapping.checkpoint_manifest(self.config, dtype)
        transfer = HostWeightTransfer(control, manifest, **{"deadline_s": 60.0, **kwargs})
        transfer.init()
        try:
            yield transfer
        finally:
            transfer.destroy()

    def push(self, transfer: HostWeightTransfer, number: int, dtype: str = "float32") -> None:
        transfer.pause()
        transfer.send(mapping.iter_checkpoint(self.config, self.params(number), dtype, on_host=True))
        transfer.resume()


TIED = Policies(pathlib.Path(model_source("builtin:tiny-arithmetic")))


def request(count: int = 24, seed: int = 3, logprobs: int | None = 1, **changes: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": count, "seed": seed, "logprobs": logprobs, "ignore_eos": True, **changes})
    return GenerateRequest(MODEL_NAME, PROMPT, params)


def generate(base_url: str, *requests: GenerateRequest) -> Any:
    """The reply, or the replies where several requests are given."""

    async def ask() -> list[GenerateResponse]:
        client = ServerClient(base_url, timeout_s=60, max_attempts=1)
        try:
            return list(await asyncio.gather(*(client.generate(item) for item in requests or (request(),))))
        finally:
            await client.close()

    replies = asyncio.run(ask())
    return replies if len(requests) > 1 else replies[0]
