"""Forward and backward time of tree-packed rows against the same samples packed without sharing.

    python scripts/bench_packing.py [--row-tokens 2048] [--rows 3] [--repeats 3]

For each packing ratio a set of groups is drawn whose rows share that much. Both layouts run the same compiled step on
the same samples, one after the other, so the ratio of their times does not depend on how busy the machine is. Compile
time and the building of batches are left out of the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.losses.builder import build_loss
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import init_params
from ajgrpo.packing.batch import TreeBatch, bucket_sizes, build_batch, choose_bucket
from ajgrpo.packing.planner import Row
from ajgrpo.training.sharding import make_mesh
from ajgrpo.training.step import StepSettings, TrainStep
from ajgrpo.types import RolloutSample

TOP_K = 8
COMPLETION = 48
"""Trained tokens of a sample; the prompt's length follows from the packing ratio."""
RATIOS = ((1.0, 1), (2.0, 8), (3.4, 8), (6.0, 16))
"""Packing ratio, and samples of a group."""
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


def make_group(rng: np.random.Generator, group: int, size: int, ratio: float) -> list[RolloutSample]:
    """``size`` samples whose common prompt gives the packing ratio: size · (P + C) / (P + size · C)."""
    prompt_length = 144 if size == 1 else round(COMPLETION * size * (ratio - 1) / (size - ratio))
    prompt = rng.integers(MODEL["vocab_size"], size=prompt_length)
    return [make_sample(rng, prompt, group) for _ in range(size)]


def make_sample(rng: np.random.Generator, prompt: np.ndarray, group: int) -> RolloutSample:
    tokens = np.concatenate([prompt, rng.integers(MODEL["vocab_size"], size=COMPLETION)]).astype(np.int32)
    sampler_ids = rng.integers(MODEL["vocab_size"], size=(COMPLETION, TOP_K)).astype(np.int32)
    return RolloutSample(
        input_ids=tokens,
        trained_positions=np.arange(len(prompt), len(tokens), dtype=np.int32),
        old_log_probs=np.full(COMPLETION, -7.6, np.float32),
        sampler_ids=sampler_ids,
        sampler_log_probs=np.full((COMPLETION, TOP_K), -7.6, np.float32),
        versions=np.zeros(COMPLETION, np.int32),
        candidate_ids=None,
        advantage=float(rng.normal()),
        group_id=group,
        row_index=group,
        prompt_index=group,
        model_version=0,
    )


def pack(samples: list[RolloutSample], budget: int, shared: bool) -> list[TreeBatch]:
    """Rows filled in order up to ``budget`` unique (``shared``) or plain tokens, each in its smallest bucket."""
    rows = [Row(budget)]
    for sample in samples:
        used = sum(other.num_tokens for other in rows[-1].samples)
        fits = rows[-1].cost_with(sample) is not None and (shared or used + sample.num_tokens <= budget)
        if not fits:
            rows.append(Row(budget))
        rows[-1].add(sample)
    sizes = bucket_sizes(budget)
    if shared:
        return [
            build_batch([row], choose_bucket(sizes, [row]), num_sampler_logprobs=TOP_K, num_candidates=0)
            for row in rows
        ]
    plain = []
    for row in rows:
        tokens = sum(sample.num_tokens for sample in row.samples)
        plain.append(concatenate(row.samples, min(size for size in sizes if size >= tokens)))
    return plain


def concatenate(samples: list[RolloutSample], size: int) -> TreeBatch:
    """One row of samples side by side: each is laid out alone and shifted."""
    total = build_batch([Row(size)], size, num_sampler_logprobs=TOP_K, num_candidates=0)
    position = term = 0
    for sample in samples:
        row = Row(size)
        row.add(sample)
        one = build_batch([row], size, num_sampler_logprobs=TOP_K, num_candidates=0)
        tokens, terms = sample.num_tokens, sample.num_trained
        for name in ("tokens", "positions", "subtree_end"):
            shift = position if name == "subtree_end" else 0
            getattr(total, name)[0, position : position + tokens] = getattr(one, name)[0, :tokens] + shift
        for name in ("targets", "old_log_probs", "advantages", "term_mask", "sampler_ids", "sampler_log_probs"):
            getattr(total, name)[0, term : term + terms] = getattr(one, name)[0, :terms]
        total.term_index[0, term : term + terms] = one.term_index[0, :terms] + position
        position, term = position + tokens, term + terms
    total.num_tokens[0], total.num_terms[0] = position, term
    return total


def build_step() -> tuple[TrainStep, Any]:
    config = ModelConfig.from_hf(MODEL)
    settings = StepSettings(compute_dtype="float32", num_sampler_logprobs=TOP_K)
    mesh = make_mesh({"data": 1, "fsdp": 1})
    step = TrainStep(config, mesh, build_loss(AsyncGRPOConfig()), optax.sgd(1e-3), settings)
    return step, jax.device_put(init_params(config, jax.random.key(0), "float32"), step.param_shardings)


def time_of(run: Callable[[list[TreeBatch]], Any], batches: list[TreeBatch]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(batches))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=3, help="tree rows of a measurement, about")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    step, params = build_step()
    gradients = step.zero_gradients()

    def run_all(batches: list[TreeBatch]) -> Any:
        nonlocal gradients
        for batch in batches:
            gradients, _ = step.accumulate(params, gradients, batch, 0)
        return gradients

    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, rows of {args.row_tokens} tokens")
    print(
        f"{'packing ratio':>14} {'tree rows':>10} {'plain rows':>11} {'tree s':>8} {'plain s':>8} "
        f"{'speed-up':>9} {'/ ratio':>9}"
    )
    for wanted, size in RATIOS:
        rng = np.random.default_rng(0)
        per_group = sum(s.num_tokens for s in make_group(rng, 0, size, wanted)) / wanted
        num_groups = args.rows * int(args.row_tokens / per_group)
        samples = [sample for group in range(num_groups) for sample in make_group(rng, group, size, wanted)]
        tree, plain = pack(samples, args.row_tokens, shared=True), pack(samples, args.row_tokens, shared=False)
        unique = sum(int(batch.num_tokens.sum()) for batch in tree)
        ratio = sum(sample.num_tokens for sample in samples) / unique
        step.compile(tuple({batch.tokens.shape[1] for batch in tree + plain}))
        pairs = [(time_of(run_all, tree), time_of(run_all, plain)) for _ in range(args.repeats)]
        tree_s, plain_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        speed_up = statistics.median(slow / fast for fast, slow in pairs)
        print(
            f"{ratio:14.2f} {len(tree):10d} {len(plain):11d} {tree_s:8.2f} {plain_s:8.2f} "
            f"{speed_up:9.2f} {speed_up / ratio:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
