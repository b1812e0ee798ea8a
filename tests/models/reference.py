"""The PyTorch models that ours are compared with, random configurations of every kind, and a dense ``attend``.

PyTorch is imported when a function is called, so that the rest of the suite runs without it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import Params, forward, head_kernel
from ajgrpo.models.layers import Attend
from ajgrpo.models.rope import ROPE_TYPES

FAMILIES = ("llama", "qwen2", "qwen3")
NUM_SEEDS = len(ROPE_TYPES)
MAX_POSITIONS = 32


def hf_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A tiny ``config.json``: 2 layers, 4 heads on 2 key-value heads of 8, 50 tokens."""
    config: dict[str, Any] = dict(
        model_type=model_type,
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    return config | changes


def model_config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """``hf_config`` as the decoder reads it."""
    return ModelConfig.from_hf(hf_config(model_type, **changes))


def random_hf_config(model_type: str, seed: int) -> dict[str, Any]:
    """A drawn ``config.json``; seeds 0 to ``NUM_SEEDS - 1`` go through all rope types."""
    rng = np.random.default_rng([FAMILIES.index(model_type), seed])
    kv_heads, share, head_dim = (int(rng.choice(choices)) for choices in ((1, 2, 3), (1, 2, 3), (4, 8, 16)))
    heads = kv_heads * share
    config = hf_config(
        model_type,
        vocab_size=int(rng.integers(40, 90)),
        hidden_size=heads * int(rng.choice((4, 8, 10))),
        intermediate_size=int(rng.integers(12, 50)),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(rng.choice((1e-6, 1e-5, 1e-3))),
        rope_parameters=rope_parameters(ROPE_TYPES[seed % len(ROPE_TYPES)], head_dim, rng),
        tie_word_embeddings=bool(rng.integers(2)),
    )
    if model_type != "qwen2":
        config["attention_bias"] = bool(rng.integers(2))
    if model_type == "llama":
        config["mlp_bias"] = bool(rng.integers(2))
    else:
        config |= dict(use_sliding_window=bool(rng.integers(2)), sliding_window=7, max_window_layers=1)
    if model_type == "qwen2":
        # Qwen2 has no head_dim of its own.
        config["hidden_size"] = heads * head_dim
    return config


def rope_parameters(kind: str, head_dim: int, rng: np.random.Generator) -> dict[str, Any]:
    """Drawn numbers of a rope type, such that all of its branches matter for sequences of about 40 tokens."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": float(rng.choice((100.0, 10000.0)))}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        parameters["factor"] = float(rng.choice((2.0, 4.0)))
    if kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = int(rng.choice((16, 64)))
    if kind == "llama3":
        parameters |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            parameters[name] = rng.uniform(1.0, 4.0, head_dim // 2).round(3).tolist()
    return parameters


def torch_model(config: dict[str, Any], seed: int = 0) -> Any:
    """The transformers model in float32, every parameter random (norms and biases too, so that they matter)."""
    import torch
    import transformers

    config = {key: value for key, value in config.items() if key != "dtype"}
    model_type = config.pop("model_type")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **config), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    # PyTorch withholds the gradient of the pad token's embedding; the pad token is often an ordinary one, such as eos.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def numpy_tensors(model: Any) -> list[tuple[str, np.ndarray]]:
    """The model's parameters under their checkpoint names."""
    return [(name, parameter.detach().numpy()) for name, parameter in model.named_parameters()]


def numpy_gradients(model: Any) -> list[tuple[str, np.ndarray]]:
    """The gradients of the model's parameters under their checkpoint names."""
    return [(name, parameter.grad.numpy()) for name, parameter in model.named_parameters()]


def causal_attend(config: ModelConfig) -> Attend:
    """Dense causal attention over one sequence; the state comes back unchanged."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
        distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(q.shape[0])[None, :]
        width = q.shape[0] if window is None else jnp.where(window == 0, q.shape[0], window)
        seen = (distance >= 0) & (distance < width)
        return dense_attention(q, k, v, seen, config.attention_scale), state

    return attend


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """q [Q, N, D], k and v [K, G, D], seen bool [Q, K] → [Q, N, D]."""
    group = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    scores = jnp.einsum("qgnd,kgd->gnqk", group, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("gnqk,kgd->qgnd", weights, v).reshape(q.shape)


def sequence_logits(config: ModelConfig, params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Logits [T, V] of one sequence."""
    positions = jnp.arange(tokens.shape[0])
    hidden, _ = forward(config, params, tokens, positions, causal_attend(config), **options)
    return hidden @ head_kernel(config, params).T.astype(hidden.dtype)
