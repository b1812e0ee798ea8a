"""Forward and backward time of tree-packed rows against the same samples packed without sharing.

    python scripts/bench_packing.py [--repeats 5] [--ratios 1.0 3.4]

Both layouts run the same compiled step on the same samples, in turn and in one process, each repeat in the opposite
order of the one before. The speed-up is the median over the repeats of the quotient of wall-clock times, printed with
its lowest and highest value; beside it stands the same of the process's CPU times, which counts no time that other
processes took (meaningful on a CPU only). Compile time and the building of batches are left out. What is chosen, and
why:

- Shapes: groups of 8 or 16 with prompts of 200 to 400 tokens and completions of 50 to 150, as short reasoning tasks
  have them, such that the packing ratio is the one named. A tree row holds whole groups.
- Rows: at most 2048 tokens in either layout, and each as long as its own tokens (rounded up to 16), so that neither
  layout gains or loses by padding.
- Model: the proportions of Qwen3 (MLP three times as wide, two query heads for each key head). Its head has 17 % of
  the weights of its layers; Qwen3-1.7B's has 22 %, Qwen3-4B's 11 %. The share matters, because the head's work is per
  loss term and so the same in both layouts: with it alone in the way, speed-up / ratio would be 0.93 at 3.4.
- Ratio 1.0: no two samples share a token, so both layouts are the same row up to the order of the samples, and the
  figure shows what is left of noise and of the tree's overhead.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from ajgrpo.packing.batch import TreeBatch, build_batch
from ajgrpo.packing.planner import Row
from ajgrpo.training.sharding import make_mesh
from ajgrpo.training.step import StepSettings, TrainStep
from ajgrpo.types import RolloutSample

TOP_K = 8
ROW_TOKENS = 2048
ROW_MULTIPLE = 16
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Samples of a group, tokens of its prompt and of each completion, and how many groups are measured.

    A position predicts one token, so the tree forks at the prompt's last token and holds ``prompt - 1`` shared ones.
    """

    group_size: int
    prompt: int
    completion: int
    num_groups: int

    @property
    def ratio(self) -> float:
        """Tokens of the samples over unique tokens."""
        if self.group_size == 1:
            return 1.0
        unique = self.prompt - 1 + self.group_size * (self.completion + 1)
        return self.group_size * (self.prompt + self.completion) / unique


SHAPES = (Shape(1, 240, 100, 6), Shape(8, 201, 149, 1), Shape(8, 352, 83, 2), Shape(16, 409, 50, 1))
"""Packing ratios 1.0, 2.0, 3.4 and 6.0."""


def make_group(rng: np.random.Generator, group: int, shape: Shape) -> list[RolloutSample]:
    """Samples with a random prompt in common and random completions that differ from their first token on."""
    prompt = rng.integers(MODEL["vocab_size"], size=shape.prompt)
    first = rng.choice(MODEL["vocab_size"], size=shape.group_size, replace=False)
    rest = rng.integers(MODEL["vocab_size"], size=(shape.group_size, shape.completion - 1))
    return [
        make_sample(rng, prompt, completion, group) for completion in np.concatenate([first[:, None], rest], axis=1)
    ]


def make_sample(rng: np.random.Generator, prompt: np.ndarray, completion: np.ndarray, group: int) -> RolloutSample:
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    trained = len(completion)
    sampler_ids = rng.integers(MODEL["vocab_size"], size=(trained, TOP_K)).astype(np.int32)
    return RolloutSample(
        input_ids=tokens,
        trained_positions=np.arange(len(prompt), len(tokens), dtype=np.int32),
        old_log_probs=np.full(trained, -9.0, np.float32),
        sampler_ids=sampler_ids,
        sampler_log_probs=np.full((trained, TOP_K), -9.0, np.float32),
        versions=np.zeros(trained, np.int32),
        candidate_ids=None,
        advantage=float(rng.normal()),
        group_id=group,
        row_index=group,
        prompt_index=group,
        model_version=0,
    )


def pack(samples: list[RolloutSample], shared: bool) -> list[TreeBatch]:
    """Rows filled in order up to ``ROW_TOKENS`` unique (``shared``) or plain tokens, each of its own length."""
    rows = [Row(ROW_TOKENS)]
    for sample in samples:
        fits = rows[-1].cost_with(sample) is not None
        if not (fits and (shared or plain_tokens(rows[-1]) + sample.num_tokens <= ROW_TOKENS)):
            rows.append(Row(ROW_TOKENS))
        rows[-1].add(sample)
    if not shared:
        return [concatenate(row.samples, round_up(plain_tokens(row))) for row in rows]
    return [build_batch([row], round_up(row.num_tokens), num_sampler_logprobs=TOP_K, num_candidates=0) for row in rows]


def plain_tokens(row: Row) -> int:
    return sum(sample.num_tokens for sample in row.samples)


def round_up(size: int) -> int:
    return -(-size // ROW_MULTIPLE) * ROW_MULTIPLE


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


def time_of(run: Callable[[list[TreeBatch]], Any], batches: list[TreeBatch]) -> tuple[float, float]:
    """Seconds of wall clock and of CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(batches))
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(step: TrainStep, params: Any, shape: Shape, repeats: int) -> str:
    """One line of the table."""
    rng = np.random.default_rng(0)
    samples = [sample for group in range(shape.num_groups) for sample in make_group(rng, group, shape)]
    layouts = pack(samples, shared=True), pack(samples, shared=False)
    tokens = [sum(int(batch.num_tokens.sum()) for batch in batches) for batches in layouts]
    ratio = tokens[1] / tokens[0]
    if abs(ratio - shape.ratio) > 1e-9:
        raise AssertionError(f"{shape} must have the packing ratio {shape.ratio}, but its rows have {ratio}")
    gradients = step.zero_gradients()

    def run(batches: list[TreeBatch]) -> Any:
        nonlocal gradients
        for batch in batches:
            gradients, _ = step.accumulate(params, gradients, batch, 0)
        return gradients

    for batches in layouts:  # compiles, and touches all memory once
        time_of(run, batches)
    times = np.zeros((repeats, 2, 2))  # repeat; tree, plain; wall, CPU
    for repeat in range(repeats):
        for layout in (0, 1) if repeat % 2 == 0 else (1, 0):
            times[repeat, layout] = time_of(run, layouts[layout])
    tree_s, plain_s = np.median(times[:, :, 0], axis=0)
    wall, cpu = (times[:, 1] / times[:, 0]).T
    return (
        f"{ratio:6.2f} {shape.group_size:6d} {shape.prompt:7d} {shape.completion:11d} {tokens[0]:12d} {tokens[1]:13d} "
        f"{tree_s:7.2f} {plain_s:8.2f} {np.median(wall):9.2f} {np.median(wall) / ratio:8.3f} "
        f"{wall.min() / ratio:7.3f} {wall.max() / ratio:8.3f} {np.median(cpu) / ratio:12.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="*", help="only these, rounded to one decimal; default: all")
    args = parser.parse_args()
    step, params = build_step()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, rows of at most {ROW_TOKENS} tokens")
    print(
        f"{'ratio':>6} {'group':>6} {'prompt':>7} {'completion':>11} {'tree tokens':>12} {'plain tokens':>13} "
        f"{'tree s':>7} {'plain s':>8} {'speed-up':>9} {'/ ratio':>8} {'lowest':>7} {'highest':>8} {'CPU / ratio':>12}"
    )
    for shape in SHAPES:
        if not args.ratios or round(shape.ratio, 1) in args.ratios:
            print(measure(step, params, shape, args.repeats), flush=True)


if __name__ == "__main__":
    main()
