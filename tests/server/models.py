"""A tiny random model for the server's tests, and the reference that its log-probs are compared with."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.hf import io
from ajgrpo.models import decoder
from ajgrpo.models.config import ModelConfig
from ajgrpo.ops.attention import TreeMask, tree_attention

HF_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "dtype": "float32",
}
CONFIG = ModelConfig.from_hf(HF_CONFIG)
REFERENCE_LENGTH = 256
PROMPT = [5, 17, 20, 33, 90, 61, 8]


@functools.lru_cache
def params(seed: int = 0):
    """Random parameters; different seeds are different policies."""
    return decoder.init_params(CONFIG, jax.random.key(seed), jnp.float32)


def write_model(directory: pathlib.Path, seed: int = 0) -> pathlib.Path:
    io.save_checkpoint(directory, HF_CONFIG, CONFIG, params(seed), dtype="float32")
    return directory


def reference(tokens: list[int], seed: int = 0, temperature: float = 1.0) -> np.ndarray:
    """log softmax(logits / temperature) of the whole sequence in one forward pass: [len(tokens), V]."""
    padded = np.zeros(REFERENCE_LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_forward(params(seed), padded, temperature))[: len(tokens)]


def token_log_probs(prompt: list[int], output: list[int], seed: int = 0, temperature: float = 1.0) -> np.ndarray:
    """The reference's log-prob of each output token."""
    table = reference(prompt + output, seed, temperature)
    return table[np.arange(len(prompt) - 1, len(prompt) + len(output) - 1), output]


@jax.jit
def _forward(parameters, tokens, temperature):
    positions = jnp.arange(REFERENCE_LENGTH, dtype=jnp.int32)
    mask = TreeMask(jnp.full(REFERENCE_LENGTH, REFERENCE_LENGTH, jnp.int32), positions)

    def attend(q, k, v, window, state):
        return tree_attention(q, k, v, mask, scale=CONFIG.attention_scale, implementation="dense"), state

    hidden, _ = decoder.forward(CONFIG, parameters, tokens, positions, attend)
    return jax.nn.log_softmax(hidden @ decoder.head_kernel(CONFIG, parameters).T / temperature)
