"""The shipped tiny model learns additions through a tool: only the environment knows whether an answer is right.

    python examples/graded_addition.py --max_steps 120 --output_dir runs/graded-addition

Every message that holds digits is a call of ``submit``; the environment answers 1 or 0, and that verdict is the reward.
A chat template and a response template as small as the model tell the trainer how calls are written. No GPU, no
download.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoTokenizer

from ajgrpo import AsyncGRPOConfig, AsyncGRPOTrainer
from ajgrpo.arithmetic import make_dataset
from ajgrpo.parts import model_source

MODEL = model_source("builtin:tiny-arithmetic")

CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '!' -}}{%- endif -%}"  # there is one tool, so one character says enough
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function.arguments.values() | join -}}{%- endfor -%}"
    "{{- '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
CALL = {"name": "submit", "arguments": {"first": "{first}", "rest": "{content}"}}
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": "(?P<first>[0-9])",
            "close": "<|im_end|>",
            "repeats": True,
            "transform": {"type": "function", "function": CALL},
        },
    },
}


class Grader:
    """Knows the right answer, and tells whether the submitted one is it."""

    def reset(self, answer: str, **kwargs: Any) -> None:
        self.answer, self.verdict = answer, 0

    def submit(self, first: str, rest: str) -> int:
        """Submits an answer; returns 1 when it is right, else 0.

        Args:
            first: The first digit.
            rest: The other digits.
        """
        self.verdict = int(first + rest == self.answer)
        return self.verdict

    def get_reward(self) -> float:
        return float(self.verdict)


def make_trainer(**options: Any) -> AsyncGRPOTrainer:
    """A trainer with the settings of the quickstart, changed by ``options``."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    settings: dict[str, Any] = {
        "vllm_server_base_url": "embedded",
        "embedded_max_model_len": 64,
        "embedded_max_num_seqs": 64,
        "bf16": False,
        "mesh": {"data": 1, "fsdp": 1},
        "max_completion_length": 8,
        "max_tool_calling_iterations": 1,
        "max_concurrent_rollouts": 128,
        "max_staleness": 1,
        "token_budget": 1024,
        "learning_rate": 3e-4,
        "adam_beta2": 0.99,
        "save_strategy": "no",
    }
    return AsyncGRPOTrainer(
        MODEL,
        args=AsyncGRPOConfig(**{**settings, **options}),
        train_dataset=make_dataset(4096, max_operand=49, seed=1),
        processing_class=tokenizer,
        environment_factory=Grader,
    )


if __name__ == "__main__":  # the rollout worker is a spawned process, which imports this script again
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--output_dir", default="runs/graded-addition")
    args = parser.parse_args()
    make_trainer(max_steps=args.max_steps, output_dir=args.output_dir).train()
