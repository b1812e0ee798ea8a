"""What generates samples: the rollout server, the worker that drives it, and the way for new weights.

    start_server ──▶ publish (version 0) ──▶ start_worker ──▶ publish (1, 2, …) ──▶ close

Versions count the pushes of this run: tokens that the server labels ``n`` were sampled under the weights of push n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from ajgrpo import preflight
from ajgrpo.canary import Canary, ModelScorer, canary_prompts
from ajgrpo.config import EMBEDDED, AsyncGRPOConfig
from ajgrpo.errors import AjgrpoError, ServerError, ServerTimeoutError
from ajgrpo.hf import mapping
from ajgrpo.inference.client import ControlClient
from ajgrpo.metrics import Metrics
from ajgrpo.models.config import ModelConfig
from ajgrpo.rollout.api import PacedRolloutWorker, RolloutWorker
from ajgrpo.rollout.loop import AsyncRolloutLoop
from ajgrpo.rollout.worker import AsyncRolloutWorker, WorkerSpec
from ajgrpo.server.launch import EmbeddedServer
from ajgrpo.weights import nccl
from ajgrpo.weights.base import WeightTransfer
from ajgrpo.weights.host import HostWeightTransfer

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 10.0, 5.0
"""How often the trainer, while it waits for samples, asks a server that it did not start whether it is there, and how
long it waits for the answer."""

Times = defaultdict[str, float]
"""Seconds by name."""


@dataclasses.dataclass(frozen=True)
class BackendParts:
    """What the server and the worker are made of.

    Attributes:
        model_dir: directory that the embedded server loads.
        model_config: the model.
        tokenizer: renders prompts.
        dataset: prompts.
        reward_funcs: scores.
        loop_cls: the rollout loop's class.
        tools: functions that the model may call.
        environment_factory: makes environments; see ``rollout.environments``.
        num_rows: rows of a micro-batch, for the first token allowance.
        start_prompt_index: the first prompt, counted over all epochs.
    """

    model_dir: Path
    model_config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    dataset: Any
    reward_funcs: Sequence[Callable[..., Any]]
    loop_cls: type[AsyncRolloutLoop]
    num_rows: int
    start_prompt_index: int
    tools: Sequence[Callable[..., Any]] = ()
    environment_factory: Any = None


class OutageWatch:
    """Asks a server that was started elsewhere now and then whether it is still there.

    A server may be restarted, so silence is first reported, and an error only when it lasts.

    Args:
        control: client of the server.
        bound_s: how long the server may be silent.
    """

    def __init__(self, control: ControlClient, bound_s: float):
        self._control, self._bound_s = control, bound_s
        self._next_probe = self._last_answer = time.monotonic()

    def check(self) -> None:
        """Asks, unless that was done less than ``PROBE_INTERVAL_S`` ago.

        Raises:
            ServerTimeoutError: it has not answered for ``bound_s`` seconds.
        """
        now = time.monotonic()
        if now < self._next_probe:
            return
        try:
            self._control.check_health(timeout_s=PROBE_TIMEOUT_S)
        except ServerError as exc:
            silent = time.monotonic() - self._last_answer
            if silent > self._bound_s:
                raise ServerTimeoutError(
                    f"the server at {self._control.base_url} has not answered for {silent:.0f} s "
                    f"(vllm_server_timeout={self._bound_s:g}): {exc}; start it again and resume from the checkpoint"
                ) from exc
            logger.warning(
                "the server at %s does not answer: %s; waiting for it until vllm_server_timeout=%g s have passed",
                *(self._control.base_url, exc, self._bound_s),
            )
        else:
            self._last_answer = time.monotonic()
        self._next_probe = time.monotonic() + PROBE_INTERVAL_S


class Backend:
    """Owns the server's process, the worker and the weight transfer of one run.

    Args:
        config: the run's configuration.
        parts: see ``BackendParts``.
        worker: used instead of the spawned worker.
        transfer: used instead of the ``host`` transport.
    """

    def __init__(
        self,
        config: AsyncGRPOConfig,
        parts: BackendParts,
        worker: RolloutWorker | None = None,
        transfer: WeightTransfer | None = None,
    ):
        self.config, self.parts = config, parts
        self.version = -1
        self.token_budget = 0
        self._worker, self._transfer = worker, transfer
        self._spawned: AsyncRolloutWorker | None = None
        self._server: EmbeddedServer | None = None
        self._outage: OutageWatch | None = None
        self._canary: Canary | None = None
        self._stack = contextlib.ExitStack()
        self._base_url = config.vllm_server_base_url
        self._model_name, self._max_model_len = "", 0

    @property
    def worker(self) -> RolloutWorker:
        """The worker; ``start_worker`` comes first."""
        assert self._worker is not None
        return self._worker

    def start_server(self) -> None:
        """Starts the embedded server if it is asked for, waits until the server answers, and prepares the transfer.

        Raises:
            ServerIncompatibleError: it lacks what training needs; with everything that is lacking.
            ServerError: it does not start or answer in time.
        """
        config = self.config
        if self._base_url == EMBEDDED:
            self._server = EmbeddedServer(
                self.parts.model_dir,
                log_path=Path(config.output_dir) / "server.log",
                max_model_len=config.embedded_max_model_len,
                max_num_seqs=config.embedded_max_num_seqs,
                dtype=config.embedded_dtype,
                max_logprobs=max(config.num_sampler_logprobs, config.top_k) + 1,
            )
            self._stack.callback(self._server.stop)
            self._base_url = self._server.start(timeout_s=config.vllm_server_timeout)
        control = ControlClient(self._base_url, timeout_s=config.vllm_server_timeout)
        self._stack.callback(control.close)
        control.wait_until_ready(config.vllm_server_timeout)
        if self._server is None:
            self._outage = OutageWatch(control, config.vllm_server_timeout)
        own_transfer = self._transfer is not None
        needs = preflight.needs_of(config, self.parts.model_config, self.parts.tokenizer, own_transfer)
        preflight.require(preflight.inspect(control, needs))
        self._model_name, self._max_model_len = control.models()
        self.token_budget = config.token_budget or self._max_model_len
        if self._transfer is None:
            self._transfer = self._build_transfer(control)
            prompts = canary_prompts(self.parts.tokenizer, self._max_model_len)
            self._canary = Canary(control, self._model_name, prompts, config)
        self._stack.callback(self._transfer.destroy)
        self._transfer.init()

    def _build_transfer(self, control: ControlClient) -> WeightTransfer:
        """The transport that the server was started for."""
        manifest = mapping.checkpoint_manifest(self.parts.model_config, self.config.compute_dtype)
        deadline_s = self.config.vllm_server_timeout
        if preflight.transfer_backend(control.server_info()) == nccl.BACKEND:
            gathers = self.parts.num_rows > 1  # as many rows as devices
            return nccl.NcclWeightTransfer(control, manifest, deadline_s=deadline_s, gathers=gathers)
        return HostWeightTransfer(control, manifest, deadline_s=deadline_s)

    def start_worker(self) -> None:
        """Starts producing rollouts, under an allowance that counts every row as full.

        Raises:
            PicklingError: something given to the worker cannot be pickled.
        """
        if self._worker is None:
            self._worker = self._spawned = AsyncRolloutWorker(self.worker_spec())
        self._stack.callback(self._worker.stop)
        self._worker.start()
        self._worker.update_model_version(self.version)

    def worker_spec(self) -> WorkerSpec:
        """What the spawned worker is told."""
        config, parts = self.config, self.parts
        rows = parts.num_rows * config.gradient_accumulation_steps
        return WorkerSpec(
            config=config,
            base_url=self._base_url,
            model_name=self._model_name,
            max_model_len=self._max_model_len,
            tokenizer=parts.tokenizer,
            dataset=parts.dataset,
            reward_funcs=parts.reward_funcs,
            tools=parts.tools,
            environment_factory=parts.environment_factory,
            loop_cls=parts.loop_cls,
            eos_token_ids=parts.model_config.eos_token_ids,
            token_allowance=config.allowed_staleness * rows * self.token_budget,
            start_prompt_index=parts.start_prompt_index,
            num_epochs=None if config.max_steps > 0 else config.num_train_epochs,
        )

    def publish(self, params: Any, times: Times) -> None:
        """Sends the weights to the server and advances the version.

        Args:
            params: the parameter tree.
            times: gets ``weight_sync_s`` and its parts ``weight_sync_pause_s`` and ``weight_sync_transfer_s``.

        Raises:
            WeightTransferError: with the phase that failed.
            ServerError: the embedded server has ended meanwhile; with the last lines of its log.
            ServerIncompatibleError: the server's log-probs are not those of the new weights.
        """
        try:
            self._push(params, times)
        except AjgrpoError as exc:
            if self._server is not None and self._server.ended():
                raise self._server_ended() from exc
            raise

    def _push(self, params: Any, times: Times) -> None:
        assert self._transfer is not None, "start_server comes first"
        start = time.perf_counter()
        self._transfer.pause()
        paused = time.perf_counter()
        config = self.config
        # On a GPU the transposes are quick and belong before the copy to the host.
        on_host = isinstance(self._transfer, HostWeightTransfer) and jax.default_backend() == "cpu"
        self._transfer.send(mapping.iter_checkpoint(self.parts.model_config, params, config.compute_dtype, on_host))
        sent = time.perf_counter()
        self.version += 1
        if self._worker is not None:
            self._worker.update_model_version(self.version)
        self._transfer.resume()
        times["weight_sync_pause_s"] += paused - start
        times["weight_sync_transfer_s"] += sent - paused
        times["weight_sync_s"] += time.perf_counter() - start
        if self._canary is not None and self._canary_is_due():
            scorer = ModelScorer(self.parts.model_config, params, config.compute_dtype)
            difference = self._canary.check(scorer, self.version)
            logger.info("canary after push %d: mean difference of log-probs %.2g", self.version, difference)

    def _canary_is_due(self) -> bool:
        steps = self.config.canary_steps
        return self.version == 0 or (steps > 0 and self.version * self.config.weight_sync_steps % steps == 0)

    def allow(self, tokens: int) -> None:
        """Lets the worker hold at most ``tokens`` tokens queued or in flight."""
        if isinstance(self._worker, PacedRolloutWorker):
            self._worker.set_token_allowance(tokens)

    def note_taken(self, tokens: int) -> None:
        """Tells the worker that a sample has left its queue."""
        if isinstance(self._worker, PacedRolloutWorker):
            self._worker.note_taken(tokens)

    def generated_tokens(self) -> int:
        """Sampled tokens of finished rollouts so far; 0 for a worker that does not tell."""
        return self._spawned.generated_tokens if self._spawned is not None else 0

    def check_health(self) -> None:
        """Raises when no more samples can be expected.

        Raises:
            ServerError: the embedded server has ended, with the last lines of its log; or one that was started
                elsewhere has not answered for ``vllm_server_timeout``.
            RolloutWorkerError: the worker has ended or hangs.
        """
        if self._server is not None and not self._server.alive():
            raise self._server_ended()
        if self._outage is not None:
            self._outage.check()
        self.worker.check_health(self.config.rollout_worker_timeout)

    def _server_ended(self) -> ServerError:
        assert self._server is not None
        return ServerError(f"the embedded server has ended; the end of its log:\n{self._server.log_tail()}")

    def drain_metrics(self, metrics: Metrics) -> None:
        """Moves what the worker has reported into ``metrics``."""
        while True:
            try:
                metrics.merge(self.worker.metrics_queue.get_nowait())
            except queue.Empty:
                return

    def close(self) -> None:
        """Stops the worker, then the transfer, then the server; each whatever stopping another raises."""
        self._stack.close()
