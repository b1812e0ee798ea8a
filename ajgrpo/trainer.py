"""The trainer: wires model, data, rollout worker and server, and runs the training loop.

    take ──▶ pack ──▶ accumulate (× gradient_accumulation_steps) ──▶ apply ──▶ publish ──▶ log ──▶ save

*take* waits for samples in the worker's queue; *pack* folds them into one row per device; *accumulate* sums gradients;
*apply* makes one optimizer update; *publish* sends the weights to the server while its requests are paused. Generation
goes on in the server during all but publish.

Left out: LoRA, several hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from transformers import PreTrainedTokenizerBase

from ajgrpo.backend import Backend, BackendParts, Times
from ajgrpo.callbacks import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.data import check_dataset
from ajgrpo.errors import CheckpointError, ConfigError, TrainingDivergedError
from ajgrpo.hf import io
from ajgrpo.interrupts import StopSignal
from ajgrpo.loggers import METRICS_FILE, Reporters, build_reporters
from ajgrpo.losses.api import LossFn, checked
from ajgrpo.losses.builder import BUILT_IN, build_loss, loss_name
from ajgrpo.metrics import Metrics
from ajgrpo.models.decoder import param_logical_axes
from ajgrpo.packing.batch import batch_metrics, bucket_sizes, build_batch, choose_bucket
from ajgrpo.packing.planner import Row
from ajgrpo.rollout.api import RolloutWorker
from ajgrpo.rollout.environments import check_parts
from ajgrpo.rollout.loop import AsyncRolloutLoop
from ajgrpo.rollout.worker import refuse_in_worker
from ajgrpo.saving import check_writable, claimed, upload_model, write_companions
from ajgrpo.tokenizer import load_tokenizer
from ajgrpo.training import checkpoint as checkpoints
from ajgrpo.training.checkpoint import RunProgress
from ajgrpo.training.flops import FlopsCounter, peak_flops
from ajgrpo.training.intake import IntakeLimits, SampleIntake, StopRequested
from ajgrpo.training.optimizer import build_optimizer, learning_rate_schedule
from ajgrpo.training.progress import PromptLedger
from ajgrpo.training.sharding import make_mesh
from ajgrpo.training.step import StepSettings, TrainState, TrainStep, observations
from ajgrpo.types import RolloutSample
from ajgrpo.weights.base import WeightTransfer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run leaves behind.

    Attributes:
        global_step: optimizer steps done, a resumed run's earlier ones included.
        metrics: the last log window.
        output_dir: the run's directory.
        metrics_path: ``metrics.jsonl``.
        checkpoint_dir: the last checkpoint; None when none was written.
    """

    global_step: int
    metrics: dict[str, float]
    output_dir: Path
    metrics_path: Path
    checkpoint_dir: Path | None


@dataclasses.dataclass
class _Run:
    """The moving parts of one call of ``train``."""

    state: TrainState
    ledger: PromptLedger
    metrics: Metrics
    backend: Backend
    intake: SampleIntake
    reporters: Reporters
    trainer_state: TrainerState
    buckets: tuple[int, ...]
    stop: StopSignal
    run_id: str
    start_step: int
    control: TrainerControl = dataclasses.field(default_factory=TrainerControl)
    saved_step: int = -1
    logged_step: int = -1
    last_loss: float = math.nan
    step_flops: float = 0.0
    saved_epoch: int = 0
    checkpoint_dir: Path | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    window_start: float = dataclasses.field(default_factory=time.perf_counter)


class AsyncGRPOTrainer:
    """Trains a language model with asynchronous GRPO.

    Args:
        model: hub id, or a directory in Hugging Face format.
        reward_funcs: callable or list of callables, sync or async, importable from a module (they are pickled).
        args: the configuration.
        train_dataset: rows with a column ``prompt`` that holds a list of messages.
        processing_class: tokenizer with a chat template; default: the model's.
        callbacks: ``TrainerCallback`` instances or classes.
        optimizer: applied to the mean gradient over trained tokens; default: from ``args``.
        peft_config: not available yet.
        tools: functions that the model may call (``rollout.tools``).
        environment_factory: makes an environment for each rollout, or a mapping of names to such factories
            (``rollout.environments``); without a dataset it gives the prompts.
        loss: a loss on JAX arrays (``ajgrpo.losses.api``); default: from ``args``.
        rollout_worker: a worker of your own; default: the spawned ``AsyncRolloutWorker``.
        weight_transfer: a transfer of your own; default: the ``host`` transport.

    Raises:
        AjgrpoError: the configuration, the dataset or the model cannot be trained.
    """

    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizer: optax.GradientTransformation | None = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        loss: LossFn | None = None,
        rollout_worker: RolloutWorker | None = None,
        weight_transfer: WeightTransfer | None = None,
    ):
        refuse_in_worker()
        if peft_config is not None:
            raise ConfigError("peft_config is not available in this version; leave it unset")
        self.args = args if args is not None else AsyncGRPOConfig()
        if self.args.router_aux_loss_coef is not None:
            raise ConfigError("router_aux_loss_coef must be unset: the model is not a mixture of experts")
        self.reward_funcs = _as_list(reward_funcs)
        check_parts(tools or (), environment_factory, has_dataset=train_dataset is not None)
        self.tools, self.environment_factory = list(tools or ()), environment_factory
        if train_dataset is not None or environment_factory is None:
            check_dataset(train_dataset, require_prompt=environment_factory is None)
        self.train_dataset = train_dataset
        self.num_prompts = len(train_dataset) if hasattr(train_dataset, "__len__") else None
        if self.num_prompts is None and self.args.max_steps <= 0:
            raise ConfigError("max_steps must be set without a dataset of known length: an epoch has no length")
        self.model_dir = io.resolve_model(model, (self.args.model_init_kwargs or {}).get("revision"))
        self.model_json, self.model_config = io.read_config(self.model_dir)
        self.processing_class = processing_class or load_tokenizer(self.model_dir, self.args.trust_remote_code)
        self.handler = CallbackHandler(callbacks or ())
        self._loss_name = loss_name(self.args) if loss is None else getattr(loss, "__qualname__", type(loss).__name__)
        self.step = self._build_step(loss, optimizer)
        self._flops = FlopsCounter(self.model_config)
        devices = self.step.mesh.devices.ravel()
        peak = peak_flops(devices[0].device_kind, self.args.compute_dtype)
        self._peak_flops = None if peak is None else peak * len(devices)
        self._schedule = learning_rate_schedule(self.args) if optimizer is None else None
        self._rollout_worker, self._weight_transfer = rollout_worker, weight_transfer
        self.params = io.load_params(
            self.model_dir, self.model_config, dtype=self.step.settings.master_dtype, place=self.step.place
        )

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainResult:
        """Runs the training loop to its end.

        Args:
            resume_from_checkpoint: a checkpoint directory, or True for the newest one of ``output_dir``.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when everything is saved and stopped.
            AjgrpoError: whatever ended the run early; what was trained until then is saved first, as it is before an
                exception of a callback or of the optimizer is raised again.
        """
        output_dir = Path(self.args.output_dir)
        check_writable(output_dir)
        self._check_model_is_elsewhere(output_dir)
        with StopSignal() as stop:
            with contextlib.ExitStack() as stack:
                stack.enter_context(claimed(output_dir))
                run = self._start(stack, stop, output_dir, resume_from_checkpoint)
                try:
                    with contextlib.suppress(StopRequested):
                        self._loop(run)
                    self._finish(run)
                except CheckpointError:
                    raise
                except Exception as exc:  # a callback's too: nothing that was trained may be lost
                    self._save_after(run, exc)
                    raise
            if stop.requested:
                raise KeyboardInterrupt
        return TrainResult(
            global_step=run.trainer_state.global_step,
            metrics=run.last_metrics,
            output_dir=output_dir,
            metrics_path=output_dir / METRICS_FILE,
            checkpoint_dir=run.checkpoint_dir,
        )

    def save_model(self, output_dir: str | Path) -> None:
        """Writes the current policy in Hugging Face format, tokenizer included.

        Raises:
            CheckpointError: the directory cannot be written.
        """
        io.save_checkpoint(
            output_dir,
            self.model_json,
            self.model_config,
            self.params,
            dtype=self.args.compute_dtype,
            write_extras=lambda path: write_companions(path, self.model_dir, self.processing_class),
        )

    def push_to_hub(self, commit_message: str = "End of training", **kwargs: Any) -> str:
        """Uploads the current policy to ``args.hub_model_id``; returns the commit's address.

        Raises:
            ConfigError: ``hub_model_id`` is not set.
        """
        return upload_model(self.args, self.save_model, commit_message, **kwargs)

    # ---- starting -------------------------------------------------------------------------------------------------

    def _build_step(self, loss: LossFn | None, optimizer: optax.GradientTransformation | None) -> TrainStep:
        args, config = self.args, self.model_config
        settings = StepSettings(
            compute_dtype=args.compute_dtype,
            master_dtype=config.dtype if args.dtype == "auto" else args.dtype,
            temperature=args.temperature,
            remat=args.gradient_checkpointing,
            num_sampler_logprobs=args.num_sampler_logprobs,
            num_candidates=args.top_k if args.truncates_sampling else 0,
        )
        return TrainStep(
            config,
            make_mesh(args.mesh),
            checked(loss, self._loss_name) if loss is not None else build_loss(args),
            optimizer or build_optimizer(args, param_logical_axes(config)),
            settings,
        )

    def _start(
        self, stack: contextlib.ExitStack, stop: StopSignal, output_dir: Path, resume: str | bool | None
    ) -> _Run:
        """Starts server, worker and reporters; what it starts is stopped by ``stack``."""
        args = self.args
        progress = RunProgress()
        if resume:
            found = checkpoints.find_checkpoint(resume, output_dir)
            progress = checkpoints.load_progress(found)
            logger.info("resuming from %s, step %d", found, progress.global_step)
            state = checkpoints.load_train_state(found, self.step.state_shapes, self.step.state_shardings)
        else:
            state = self.step.init_state(self.params)
        self.params = state.params
        reporters = build_reporters(args, output_dir, progress.global_step)
        stack.callback(reporters.close)
        ledger, metrics = PromptLedger(progress.next_prompt_index), Metrics()
        backend = Backend(
            args,
            BackendParts(
                model_dir=self.model_dir,
                model_config=self.model_config,
                tokenizer=self.processing_class,
                dataset=self.train_dataset,
                reward_funcs=self.reward_funcs,
                loop_cls=self.loop_cls,
                tools=self.tools,
                environment_factory=self.environment_factory,
                num_rows=self.step.num_rows,
                start_prompt_index=ledger.first_unfinished,
            ),
            worker=self._rollout_worker,
            transfer=self._weight_transfer,
        )
        stack.callback(backend.close)
        backend.start_server()
        backend.publish(self.params, defaultdict(float))
        backend.start_worker()
        limits = IntakeLimits(
            num_rows=self.step.num_rows,
            token_budget=backend.token_budget,
            max_staleness=args.max_staleness,
            stall_timeout_s=args.rollout_stall_timeout,
            num_prompts=self._prompt_limit(),
        )
        buckets = bucket_sizes(backend.token_budget)
        for size in buckets:
            self.step.compile((size,))
            backend.check_health()  # compiling takes long: a worker that could not even start is told of now
        metrics.add("perf/compile_count", len(buckets))
        trainer_state = TrainerState(
            global_step=progress.global_step, max_steps=args.max_steps, num_tokens=progress.num_tokens
        )
        run = _Run(
            state=state,
            ledger=ledger,
            metrics=metrics,
            backend=backend,
            intake=SampleIntake(
                backend.worker.rollout_queue,
                limits,
                ledger,
                metrics,
                on_taken=backend.note_taken,
                check_health=backend.check_health,
                stop_requested=lambda: stop.requested,
            ),
            reporters=reporters,
            trainer_state=trainer_state,
            buckets=buckets,
            stop=stop,
            run_id=progress.run_id,
            start_step=progress.global_step,
            saved_step=progress.global_step,
            logged_step=progress.global_step,
        )
        self._call("on_train_begin", run)
        return run

    def _prompt_limit(self) -> int | None:
        """Prompts after which training ends; None when ``max_steps`` decides."""
        if self.args.max_steps > 0 or self.num_prompts is None:
            return None
        return math.ceil(self.args.num_train_epochs * self.num_prompts)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _loop(self, run: _Run) -> None:
        state, control = run.trainer_state, run.control
        while not (self._reached_max_steps(state) or control.should_training_stop or run.stop.requested):
            self._call("on_step_begin", run)
            times: Times = defaultdict(float)
            start = time.perf_counter()
            if not self._train_one_step(run, times):
                break
            if state.global_step % self.args.weight_sync_steps == 0:
                run.backend.publish(self.params, times)
            times["step_s"] = time.perf_counter() - start
            run.metrics.update({f"perf/{name}": seconds for name, seconds in times.items()})
            self._call("on_step_end", run)
            self._log_if_due(run)
            self._save_if_due(run)

    def _train_one_step(self, run: _Run, times: Times) -> bool:
        """Take, pack, accumulate, apply. Returns False, with nothing changed, at the end of the data."""
        gradients = self.step.zero_gradients()
        trained: list[RolloutSample] = []
        num_terms = forwarded = microbatches = 0
        for _ in range(self.args.gradient_accumulation_steps):
            rows, waited = run.intake.next_micro_batch(run.backend.version)
            times["rollout_wait_s"] += waited
            if not rows:
                break
            gradients = self._accumulate(run, gradients, rows, times)
            trained += [sample for row in rows for sample in row.samples]
            num_terms += sum(row.num_terms for row in rows)
            forwarded += sum(row.num_tokens for row in rows)
            microbatches += 1
        if not trained:
            return False
        run.metrics.add("batch/microbatches_per_step", microbatches)
        self._apply(run, gradients, num_terms, times)
        for sample in trained:
            run.ledger.resolve(sample.prompt_index)
        run.backend.allow(self.args.allowed_staleness * sum(sample.num_tokens for sample in trained))
        self._count_step(run, trained, num_terms, forwarded, times)
        return True

    def _accumulate(self, run: _Run, gradients: Any, rows: list[Row], times: Times) -> Any:
        size = choose_bucket(run.buckets, rows)
        settings = self.step.settings
        batch = build_batch(
            rows,
            size,
            num_sampler_logprobs=settings.num_sampler_logprobs,
            num_candidates=settings.num_candidates,
            pad_token_id=self.model_config.pad_token_id or 0,
        )
        run.step_flops += self._flops.count(batch)
        generated, start = run.backend.generated_tokens(), time.perf_counter()
        gradients, metrics = self.step.accumulate(self.params, gradients, batch, run.backend.version)
        run.metrics.merge(observations(metrics))
        total, count = np.asarray(metrics["loss"]).tolist()
        run.last_loss = total / count
        jax.block_until_ready(gradients)
        times["fwd_bwd_s"] += time.perf_counter() - start
        run.metrics.add("perf/fwd_bwd_generated_tokens_count", run.backend.generated_tokens() - generated)
        run.metrics.merge(batch_metrics(rows, batch))
        return gradients

    def _apply(self, run: _Run, gradients: Any, num_terms: int, times: Times) -> None:
        start = time.perf_counter()
        step = run.trainer_state.global_step
        run.state, norm = self.step.apply(run.state, gradients, num_terms)
        self.params = run.state.params
        grad_norm = float(norm)
        times["optimizer_s"] += time.perf_counter() - start
        if not math.isfinite(grad_norm):
            raise TrainingDivergedError(
                f"the gradient of step {step + 1} is not finite (norm {grad_norm}); the parameters are still those of "
                f"step {step}. The mean of the loss {self._loss_name!r} was {run.last_loss:g}. "
                f"{self._divergence_advice(run)}"
            )
        run.trainer_state.global_step = step + 1
        run.metrics.add("grad_norm", grad_norm)
        if self._schedule is not None:
            run.metrics.add("learning_rate", float(self._schedule(step)))

    def _divergence_advice(self, run: _Run) -> str:
        if not math.isfinite(run.last_loss) and self._loss_name not in BUILT_IN:
            return "Guard its logarithms, divisions and exponentials: log-probs may be -inf, ratios huge"
        return "Lower learning_rate, or compute in bfloat16 or float32 if fp16 is set"

    def _count_step(
        self, run: _Run, trained: list[RolloutSample], num_terms: int, forwarded: int, times: Times
    ) -> None:
        state, metrics = run.trainer_state, run.metrics
        state.num_tokens += forwarded
        state.epoch = self._epoch(run)
        metrics.update(
            {
                "batch/forwarded_tokens_per_step": forwarded,
                "batch/trained_tokens_per_step": num_terms,
                "batch/samples_per_step": len(trained),
                "batch/groups_per_step": len({sample.group_id for sample in trained}),
                "rollout/queue_size": run.backend.worker.rollout_queue.qsize(),
            }
        )
        metrics.add_rate("perf/fwd_bwd_forwarded_tokens_per_s", forwarded, times["fwd_bwd_s"])
        now = time.perf_counter()
        wall, run.window_start = now - run.window_start, now
        metrics.add_rate("perf/wall_clock_forwarded_tokens_per_s", forwarded, wall)
        metrics.add_rate("perf/wall_clock_trained_tokens_per_s", num_terms, wall)
        if self._peak_flops is not None:
            metrics.add_rate("perf/fwd_bwd_mfu", run.step_flops, self._peak_flops * times["fwd_bwd_s"])
            metrics.add_rate("perf/wall_clock_mfu", run.step_flops, self._peak_flops * wall)
        run.step_flops = 0.0

    def _log_if_due(self, run: _Run) -> None:
        state = run.trainer_state
        due = state.global_step % self.args.logging_steps == 0 or self._reached_max_steps(state)
        if due or run.control.should_log:
            run.control.should_log = False
            self._log(run)

    def _log(self, run: _Run) -> None:
        """Closes the log window."""
        state = run.trainer_state
        run.backend.drain_metrics(run.metrics)
        logs = {**run.metrics.reduce(), "epoch": state.epoch, "num_tokens": state.num_tokens}
        run.metrics.drain()
        run.last_metrics, run.logged_step = logs, state.global_step
        state.log_history.append({**logs, "step": state.global_step})
        run.reporters.log(state.global_step, logs)
        self._call("on_log", run, logs=logs)

    def _save_if_due(self, run: _Run) -> None:
        args, state = self.args, run.trainer_state
        due = args.save_strategy == "steps" and state.global_step % args.save_steps == 0
        if args.save_strategy == "epoch" and int(state.epoch) > run.saved_epoch:
            run.saved_epoch, due = int(state.epoch), True
        if due or run.control.should_save:
            run.control.should_save = False
            self._save(run)

    def _save(self, run: _Run) -> None:
        """Writes a checkpoint, unless the last one already holds this step."""
        args, state = self.args, run.trainer_state
        if args.save_strategy == "no" or run.saved_step == state.global_step:
            return
        progress = RunProgress(state.global_step, state.num_tokens, run.ledger.first_unfinished, run.run_id)
        run.checkpoint_dir = checkpoints.save_checkpoint(
            Path(args.output_dir),
            progress,
            None if args.save_only_model else run.state,
            self.save_model,
            keep=args.save_total_limit,
        )
        run.saved_step = state.global_step
        self._call("on_save", run)
        if args.push_to_hub and args.hub_strategy == "every_save":
            self.push_to_hub(f"Step {state.global_step}")

    def _finish(self, run: _Run) -> None:
        """Logs what is left in the window, saves, and tells the callbacks."""
        state = run.trainer_state
        logged_epoch, state.epoch = state.epoch, self._epoch(run)
        # Groups dropped after the last step end no step, but they count for the epoch.
        if run.logged_step != state.global_step or (self._prompt_limit() is not None and state.epoch > logged_epoch):
            self._log(run)
        if state.global_step == run.start_step and not run.stop.requested:
            logger.warning(
                "no step was trained: the run began at step %d of max_steps=%d, and %d of %s prompts are done",
                *(run.start_step, self.args.max_steps, run.ledger.num_done, self._prompt_limit() or "unlimited"),
            )
        self._save(run)
        self._call("on_train_end", run)
        if self.args.push_to_hub and self.args.hub_strategy == "end":
            self.push_to_hub()

    def _save_after(self, run: _Run, error: Exception) -> None:
        """Keeps what was trained before ``error`` ended the loop. What fails on the way is told beside ``error``."""
        step = run.trainer_state.global_step
        try:
            if run.logged_step != step:
                self._log(run)
        except Exception as second:  # a tracker's or a callback's; it must neither hide the first nor prevent saving
            error.add_note(f"besides, step {step} could not be logged: {type(second).__name__}: {second}")
        try:
            self._save(run)
        except Exception as second:
            error.add_note(f"besides, step {step} could not be saved: {type(second).__name__}: {second}")

    def _epoch(self, run: _Run) -> float:
        return run.ledger.num_done / self.num_prompts if self.num_prompts else 0.0

    def _check_model_is_elsewhere(self, output_dir: Path) -> None:
        """A new run moves another run's checkpoints aside when it needs their names; its own model may not be one."""
        model_dir = self.model_dir.resolve()
        if model_dir.parent == output_dir.resolve() and checkpoints.CHECKPOINT_NAME.fullmatch(model_dir.name):
            raise ConfigError(
                f"model={str(self.model_dir)!r} is a checkpoint inside output_dir={self.args.output_dir!r}, which "
                "this run's checkpoints may replace: set another output_dir, or go on with that run by "
                "resume_from_checkpoint"
            )

    def _reached_max_steps(self, state: TrainerState) -> bool:
        return 0 < self.args.max_steps <= state.global_step

    def _call(self, event: str, run: _Run, **kwargs: Any) -> None:
        self.handler.call(event, self.args, run.trainer_state, run.control, **kwargs)


def _as_list(value: Callable[..., Any] | Sequence[Callable[..., Any]] | None) -> list[Callable[..., Any]]:
    if value is None:
        return []
    return [value] if callable(value) else list(value)
