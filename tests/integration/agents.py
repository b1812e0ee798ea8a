"""An environment that the tiny model can act in: it submits its answer to an addition through a tool.

The tool-calling format is as small as the model: every message is the argument of a call, until the environment has
answered once.
"""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.tool_calls -%}{{- message.tool_calls[0].function.arguments.answer -}}"
    "{%- else -%}{{- message.content -}}{%- endif -%}{{- '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    "{%- if tools and false -%}{%- endif -%}"
)


class Grader:
    """Knows the right answer, and tells whether the submitted one is it."""

    def reset(self, answer: str, **kwargs: Any) -> None:
        self.answer, self.verdict = answer, ""

    def submit(self, answer: str) -> str:
        """Submits the answer.

        Args:
            answer: Decimal digits.
        """
        self.verdict = "1" if answer == self.answer else "0"
        return self.verdict

    def get_reward(self) -> float:
        return float(self.verdict == "1")
