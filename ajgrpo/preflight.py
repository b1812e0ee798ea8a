"""Whether a rollout server has what training needs: asked of the server itself, before anything else is done with it.

    Needs (from configuration, model, tokenizer)  ──▶ inspect(server) ──▶ findings ──▶ require: one error with them all

Every failed check names the flag to set. A check that needs what an earlier one could not get says so, so that one
mistake is reported once. Left out: what only a weight push shows (``canary``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerError, ServerIncompatibleError
from ajgrpo.inference.client import ControlClient, parse_metrics
from ajgrpo.inference.protocol import GenerateRequest, SamplingParams
from ajgrpo.models.config import ModelConfig

logger = logging.getLogger(__name__)

OK, WARNING, FAILED, NOT_CHECKED = "ok", "warning", "failed", "not checked"

PROBE_TEXT = "What is 12 + 34? Ünïcode, 日本.\n"
"""Tokenised by both sides."""

BACKENDS = ("host", "nccl")
PROCESSED = "processed_logprobs"
CACHE_METRIC = "vllm:kv_cache_usage_perc"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a table of checks: ``status`` is ``ok``, ``warning``, ``failed`` or ``not checked``."""

    title: str
    status: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run asks of its server.

    Attributes:
        logprobs: log-probs per token, the sampled one included.
        max_completion_length: tokens, which a prompt comes on top of.
        compute_dtype: the trainer's.
        own_transfer: the run brings its own weight transfer.
        tokenizer: its vocabulary must be the server's; None: not compared.
        eos_token_ids: must be tokens of the server.
        length_limit: longest text that the model's RoPE scaling is computed for; None: no limit, or unknown.
    """

    logprobs: int
    max_completion_length: int
    compute_dtype: str
    own_transfer: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    eos_token_ids: tuple[int, ...] = ()
    length_limit: int | None = None


def needs_of(
    config: AsyncGRPOConfig,
    model: ModelConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    own_transfer: bool = False,
) -> Needs:
    """The needs of a run; ``model`` and ``tokenizer`` may be unknown."""
    return Needs(
        logprobs=max(config.num_sampler_logprobs, config.top_k if config.truncates_sampling else 0) + 1,
        max_completion_length=config.max_completion_length,
        compute_dtype=config.compute_dtype,
        own_transfer=own_transfer,
        tokenizer=tokenizer,
        eos_token_ids=model.eos_token_ids if model is not None else (),
        length_limit=model.length_limit if model is not None else None,
    )


def inspect(control: ControlClient, needs: Needs) -> list[Finding]:
    """Runs every check. Raises nothing: a server that cannot be asked is a failed check."""
    return Inspection(control, needs).findings()


def require(findings: Sequence[Finding]) -> None:
    """Logs warnings.

    Raises:
        ServerIncompatibleError: with every failed check.
    """
    for finding in findings:
        if finding.status == WARNING:
            logger.warning("%s: %s", finding.title, finding.detail)
    failed = [f"{finding.title}: {finding.detail}" for finding in findings if finding.status == FAILED]
    if failed:
        raise ServerIncompatibleError(
            "the rollout server cannot be used:\n" + "\n".join(f"  - {line}" for line in failed)
        )


def transfer_backend(server_info: Mapping[str, Any]) -> str | None:
    """The weight transfer backend that a server was started with."""
    return (server_info.get("weight_transfer_config") or {}).get("backend")


class Inspection:
    """The checks. Each returns status and detail, or raises a ``ServerError`` that becomes the detail."""

    def __init__(self, control: ControlClient, needs: Needs):
        self.control, self.needs = control, needs
        self.model_name = ""
        self.version = ""
        self.info: dict[str, Any] = {}

    def findings(self) -> list[Finding]:
        checks: list[tuple[str, Callable[[], tuple[str, str]], str]] = [
            ("server", self.server, ""),
            ("developer mode", self.developer_mode, "server"),
            ("context length", self.context_length, "server"),
            ("weight transfer", self.weight_transfer, "developer mode"),
            ("log-probs", self.logprobs_mode, "developer mode"),
            ("number of log-probs", self.logprobs_count, "developer mode"),
            ("dtype", self.dtype, "developer mode"),
            ("workers", self.workers, "developer mode"),
            ("LoRA", self.lora, "developer mode"),
            ("paused", self.paused, "developer mode"),
            ("generation endpoint", self.endpoint, "server"),
            ("tokenizer", self.tokenizer, "server"),
            ("vocabulary", self.vocabulary, "paused"),
            ("metrics", self.metrics, "server"),
        ]
        status: dict[str, str] = {"": OK}
        found = []
        for title, check, need in checks:
            if status[need] != OK:
                result = (NOT_CHECKED, f"needs {need!r}")
            else:
                try:
                    result = check()
                except ServerError as exc:
                    result = (FAILED, str(exc))
            status[title] = result[0]
            found.append(Finding(title, *result))
        return found

    def server(self) -> tuple[str, str]:
        self.version = self.control.check_version()
        self.model_name, self.max_model_len = self.control.models()
        return OK, f"{self.model_name} on version {self.version} at {self.control.base_url}"

    def developer_mode(self) -> tuple[str, str]:
        self.info = self.control.server_info()
        return OK, "VLLM_SERVER_DEV_MODE=1"

    def context_length(self) -> tuple[str, str]:
        asked = self.needs.max_completion_length
        if asked >= self.max_model_len:
            return FAILED, (
                f"max_completion_length={asked} leaves no room for a prompt: the server's max_model_len is "
                f"{self.max_model_len}; lower it, or start the server with a larger --max-model-len"
            )
        limit = self.needs.length_limit
        if limit is not None and self.max_model_len > limit:
            return FAILED, (
                f"the server at {self.control.base_url} accepts texts of max_model_len={self.max_model_len} tokens, "
                f"but this model's RoPE scaling is computed for at most {limit}; start it with --max-model-len {limit}"
            )
        return OK, f"max_model_len {self.max_model_len}"

    def weight_transfer(self) -> tuple[str, str]:
        backend = transfer_backend(self.info)
        if not self.needs.own_transfer and backend not in BACKENDS:
            return FAILED, (
                f"the server's backend is {backend!r}; start it with --weight-transfer-config "
                '\'{"backend": "nccl"}\', or with "host", which needs the plugin in the server\'s environment: '
                "pip install --no-deps ajgrpo"
            )
        return OK, str(backend)

    def logprobs_mode(self) -> tuple[str, str]:
        mode = self._model("logprobs_mode")
        if mode != PROCESSED:
            return FAILED, f"the server's log-probs are {mode!r}; start it with --logprobs-mode {PROCESSED}"
        return OK, PROCESSED

    def logprobs_count(self) -> tuple[str, str]:
        offered, asked = self._model("max_logprobs"), self.needs.logprobs
        if offered is not None and offered != -1 and offered < asked:
            return FAILED, (
                f"num_sampler_logprobs or top_k ask for {asked}, the server gives at most {offered}; start it with "
                f"--max-logprobs {asked}"
            )
        return OK, f"{asked} of {'any number' if offered in (None, -1) else offered}"

    def dtype(self) -> tuple[str, str]:
        server = str(self._model("dtype")).removeprefix("torch.")
        trainer = self.needs.compute_dtype
        if server != trainer:
            return WARNING, f"the server computes in {server}, the trainer in {trainer}; set --dtype, or bf16/fp16"
        return OK, server

    def workers(self) -> tuple[str, str]:
        size, parallel = self.control.world_size(), self.info.get("parallel_config") or {}
        axes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        product = 1
        for axis in axes:
            product *= int(parallel.get(axis) or 1)
        if size != product:
            return FAILED, f"the server counts {size} workers, its parallel configuration gives {product}"
        return OK, f"{size}"

    def lora(self) -> tuple[str, str]:
        lora = self.info.get("lora_config")
        if not lora:
            return OK, "off: whole weights are pushed"
        return OK, f"max_loras {lora.get('max_loras')}, max_lora_rank {lora.get('max_lora_rank')}; not used"

    def paused(self) -> tuple[str, str]:
        if self.control.is_paused():
            return WARNING, "the server is paused, perhaps by a trainer that was killed; the first push repairs it"
        return OK, "no"

    def endpoint(self) -> tuple[str, str]:
        if self.control.offers_generate():
            return OK, "/inference/v1/generate"
        return WARNING, (
            "/v1/completions, which does not say which policy sampled a token; start the server with --enable-scale-out"
        )

    def tokenizer(self) -> tuple[str, str]:
        tokenizer = self.needs.tokenizer
        theirs = self.control.tokenize(PROBE_TEXT, self.model_name) if tokenizer is not None else None
        if tokenizer is None or theirs is None:
            return NOT_CHECKED, "the server offers no tokenizer" if tokenizer is not None else "the model is unknown"
        ours = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
        if ours != theirs:
            return FAILED, (
                f"the server turns the same text into other ids ({theirs[:8]}…, here {ours[:8]}…): it runs another "
                "model; start it with the trainer's --model"
            )
        return OK, f"the same {len(ours)} ids for a probe"

    def vocabulary(self) -> tuple[str, str]:
        """The highest id of the trainer's tokenizer and its end-of-sequence ids must be tokens of the server."""
        tokenizer = self.needs.tokenizer
        if tokenizer is None:
            return NOT_CHECKED, "the model is unknown"
        ids = sorted({len(tokenizer) - 1, *self.needs.eos_token_ids})
        request = GenerateRequest(self.model_name, ids, SamplingParams(max_tokens=1, temperature=0.0))
        try:
            self.control.generate(request)
        except ServerError as exc:
            return FAILED, f"the server refuses the ids {ids} of the trainer's tokenizer: {exc}"
        return OK, f"knows the ids {ids}"

    def metrics(self) -> tuple[str, str]:
        if CACHE_METRIC in parse_metrics(self.control.metrics_text()):
            return OK, "/metrics"
        return WARNING, f"/metrics lacks {CACHE_METRIC}: concurrency will not adapt to the server's load"

    def _model(self, key: str) -> Any:
        return (self.info.get("model_config") or {}).get(key)
