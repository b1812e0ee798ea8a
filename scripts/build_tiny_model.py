"""Builds the tiny Qwen3 model and the tokenizer that ship in ``ajgrpo/assets/tiny_arithmetic``.

    python scripts/build_tiny_model.py [--output DIR] [--target P]

A byte-level BPE tokenizer with the ChatML template and a randomly initialised decoder get a short supervised warm-up on
additions, which ends when about a third of the sampled answers are right: enough reward to learn from, and room to
improve. Everything is seeded; the script prints the accuracy that it reached.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ajgrpo.arithmetic import arithmetic_rows
from ajgrpo.hf.io import save_checkpoint
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import forward, head_kernel, init_params
from ajgrpo.ops.attention import TreeMask, tree_attention

ASSETS = Path(__file__).parent.parent / "ajgrpo" / "assets" / "tiny_arithmetic"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
LENGTH = 24
"""Tokens of a training sequence, padding included."""
BATCH = 128
MAX_STEPS = 2000

Batch = tuple[np.ndarray, np.ndarray]
"""Token ids [N, LENGTH] and the mask of the answers' tokens (the end token included), same shape."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, the ChatML markers, and merges for the words of the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["system\nuser\nassistant\n"] * 10, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config(vocab_size: int, eos: int, pad: int) -> dict[str, Any]:
    """``config.json`` of the model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> Batch:
    """Renders the rows' prompts and answers."""
    ids = np.full((len(rows), LENGTH), tokenizer.pad_token_id, np.int32)
    mask = np.zeros((len(rows), LENGTH), bool)
    for index, row in enumerate(rows):
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
        ids[index, : len(prompt) + len(answer)] = prompt + answer
        mask[index, len(prompt) : len(prompt) + len(answer)] = True
    return ids, mask


def answer_log_probs(config: ModelConfig, params: Any, ids: jax.Array) -> jax.Array:
    """Log-prob of every token but the first, [N, LENGTH - 1]."""
    positions = jnp.arange(LENGTH)
    mask = TreeMask(jnp.full(LENGTH, LENGTH), positions)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: Any, state: Any) -> tuple[jax.Array, Any]:
        scale = config.attention_scale
        return tree_attention(q, k, v, mask, scale=scale, window=window, implementation="dense"), state

    def one(tokens: jax.Array) -> jax.Array:
        hidden, _ = forward(config, params, tokens, positions, attend, compute_dtype="float32")
        logits = hidden @ head_kernel(config, params).T
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], tokens[1:, None], axis=1)[:, 0]

    return jax.vmap(one)(ids)


jit_log_probs = jax.jit(answer_log_probs, static_argnums=0)


def accuracy(config: ModelConfig, params: Any, held_out: Batch) -> float:
    """Probability that a sampled answer is right, averaged over the prompts."""
    ids, mask = held_out
    log_probs = jit_log_probs(config, params, ids)
    return float(np.exp(np.where(mask[:, 1:], log_probs, 0.0).sum(axis=1)).mean())


def warm_up(config: ModelConfig, training: Batch, held_out: Batch, target: float, seed: int) -> Any:
    """Supervised training on the answers' tokens until ``accuracy`` on ``held_out`` reaches ``target``."""
    params = init_params(config, jax.random.key(seed), "float32")
    rate = optax.linear_schedule(0.0, 2e-3, 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    state = optimizer.init(params)

    def loss_of(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        log_probs = answer_log_probs(config, params, ids)
        return -(log_probs * mask[:, 1:]).sum() / mask[:, 1:].sum()

    @jax.jit
    def update(params: Any, state: Any, ids: jax.Array, mask: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, ids, mask)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    ids, mask = training
    rng = np.random.default_rng(seed)
    for step in range(MAX_STEPS):
        batch = rng.integers(0, len(ids), BATCH)
        params, state, loss = update(params, state, ids[batch], mask[batch])
        if step % 5 == 4:
            reached = accuracy(config, params, held_out)
            print(f"step {step + 1}: loss {float(loss):.3f}, chance of a right answer {reached:.3f}", flush=True)
            if reached >= target:
                return params
    raise SystemExit(f"the warm-up did not reach {target} within {MAX_STEPS} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS)
    parser.add_argument("--target", type=float, default=0.30)
    parser.add_argument("--max-operand", type=int, default=49)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = build_tokenizer()
    config_json = model_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    config = ModelConfig.from_hf(config_json)
    training = encode(tokenizer, arithmetic_rows(20000, max_operand=args.max_operand, seed=args.seed + 1))
    held_out = encode(tokenizer, arithmetic_rows(256, max_operand=args.max_operand, seed=args.seed + 2))
    params = warm_up(config, training, held_out, args.target, args.seed)

    args.output.mkdir(parents=True, exist_ok=True)
    save_checkpoint(args.output, config_json, config, params, dtype="bfloat16")
    tokenizer.save_pretrained(args.output)
    size = sum(path.stat().st_size for path in args.output.iterdir())
    print(json.dumps({"output": args.output.name, "bytes": size}))


if __name__ == "__main__":
    main()
