"""The server's side of the host transport inside a vLLM worker.

    update_weights: connect ─▶ receive everything ─▶ load layer by layer ─▶ complete? ─▶ finalise ─▶ tell the trainer
                       └─ fails: weights untouched         └─ fails: layers not yet loaded get their old tensors back

The model is open for loading only inside ``update_weights``. vLLM's own engines open it in ``start_weight_update``, and
a server that generates before ``finish_weight_update`` then ends; with this one it goes on. A failure while loading
leaves a model whose first layers are new: it works, and a whole push repairs it.

With several workers an exception that reaches vLLM puts its executor out of step: the other workers' replies stay in
the queue, and later calls read them. Errors of an update then go to the trainer on the transfer's connection only.

Left out: quantized models; the draft model of speculative decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from ajgrpo.weights import base
from ajgrpo.weights.base import HostInitInfo, TensorSpec

try:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
except ImportError as exc:
    raise ImportError(
        f"the weight transfer backend {base.BACKEND!r} of ajgrpo knows vLLM 0.28 to 0.32 and lacks something in "
        f"{vllm.__version__}: {exc}; install vLLM 0.32, or use the backend 'nccl'"
    ) from exc

logger = logging.getLogger("vllm.ajgrpo")


class HostEngine(WeightTransferEngine):
    """Receives whole models from a trainer's ``weights.host.HostWeightTransfer``."""

    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._info: HostInitInfo | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> HostInitInfo:
        """Reads the ``init_info``; raises ValueError on a bad value."""
        return HostInitInfo.from_json(init_dict)

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Notes where the trainer listens. Nothing is kept open, so a trainer may restart."""
        self._info = init_info

    def start_weight_update(self) -> None:
        """Nothing: see the top of the module."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives all tensors of the manifest and loads them."""
        try:
            self._update(update_info)
        except Exception as exc:
            if self.parallel_config.world_size == 1:
                raise
            logger.error("the weight update failed: %s: %s", type(exc).__name__, exc)

    def finish_weight_update(self) -> None:
        """Nothing: the weights are complete when ``update_weights`` returns."""

    def receive_weights(self, update_info: Any) -> None:
        """Part of vLLM's interface that ``update_weights`` replaces."""
        raise NotImplementedError("the host transport receives in update_weights")

    def shutdown(self) -> None:
        """Forgets the trainer."""
        self._info = None

    def _update(self, update_info: dict[str, Any]) -> None:
        if self._info is None:
            raise RuntimeError("host weight transfer not initialized: call init_weight_transfer_engine first")
        start = time.perf_counter()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        with base.receiving(self._info, update_info, rank) as tensors:
            staged = [(spec.name, as_tensor(spec, raw)) for spec, raw in tensors]
            received = time.perf_counter()
            self._load(staged)
        seconds = (received - start, time.perf_counter() - received)
        logger.info("%d tensors received in %.3f s, loaded in %.3f s", len(staged), *seconds)

    def _load(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self._load_weights(staged)
            if incomplete := self._incomplete():
                raise ValueError(f"manifest does not cover the model; not or partly loaded: {', '.join(incomplete)}")
        except BaseException:
            self._forget_partial_layers()
            raise
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self._refresh_tied_head()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

    def _load_weights(self, staged: list[tuple[str, torch.Tensor]]) -> None:
        taken = ""

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal taken
            for name, tensor in staged:
                taken = f"{name} {list(tensor.shape)}"
                yield name, tensor.to(self.device)

        try:
            with torch.no_grad(), disable_mtp_completeness_check():
                self.model.load_weights(stream())
        except Exception as exc:  # whatever a model's loader raises, some of it without a word
            raise RuntimeError(f"cannot load {taken}: {type(exc).__name__}: {exc}") from exc

    def _incomplete(self) -> list[str]:
        """Modules that did not get all their parameters; vLLM alone would accept them, half old or uninitialised."""
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        found = []
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            parameters = [parameter for parameter in module.parameters(recurse=False) if parameter is not None]
            if not info.can_load() or not parameters or (tied and isinstance(module, ParallelLMHead)):
                continue
            wanted = sum(getattr(parameter, "weight_loader_numel", parameter.numel()) for parameter in parameters)
            # A vocabulary table is one tensor, whose rows of padding are never loaded.
            padded = isinstance(module, VocabParallelEmbedding) and info.load_numel > 0
            if info.load_numel < wanted and not padded:
                found.append(f"{name} ({info.load_numel}/{wanted})")
        return found

    def _forget_partial_layers(self) -> None:
        """Makes vLLM treat layers that are not complete as not loaded: it then puts their old tensors back."""
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()

    def _refresh_tied_head(self) -> None:
        """On the CPU a tied head keeps a packed copy of the embedding, which no tensor of the checkpoint renews."""
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and getattr(module, "cpu_linear", None) is not None:
                module.quant_method.process_weights_after_loading(module)


def as_tensor(spec: TensorSpec, raw: np.ndarray) -> torch.Tensor:
    """The tensor whose row-major bytes are ``raw`` (uint8 [nbytes]), without a copy where they are aligned."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).view(spec.shape)
