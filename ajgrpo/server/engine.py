"""The engine: one thread that owns the weights, the KV cache and the schedule, and decodes for all slots at once.

    HTTP handlers ── inbox ──▶ engine thread:  take the inbox ▶ admit ▶ prefill ▶ one decode step ▶ hand out results
                 ◀── futures ─                 (waits on the inbox when paused or idle)

Everything the thread owns is touched by it alone; other threads put a call into the inbox and get a future. So calls
take effect between two decode steps, and no lock is needed.

A pause (``mode=keep``) and new weights drop the KV cache and send running requests back to the queue with their tokens.
When they are admitted again their keys and values are computed anew from prompt and output, with the weights of that
moment, so the log-probs after a weight swap are exactly those of the new policy.

Left out: chunked prefill, several models, speculative decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.errors import ServerError
from ajgrpo.inference.protocol import SamplingParams
from ajgrpo.models.config import ModelConfig
from ajgrpo.server import kernels
from ajgrpo.server.inputs import Lanes, num_candidates, num_top, prefill_row
from ajgrpo.server.sampling import Drawn
from ajgrpo.server.scheduler import Generation, Scheduler, Segment, pack_rows, round_up, segments

CACHE_STEP = 128
"""The cache holds this many positions a slot, doubled as often as the longest running sequence needs."""

PREFILL_STEP = 64
PREFILL_ROW_TOKENS = 512
"""Prefill rows are 64, 128, 256 or 512 tokens long; longer only for a single sequence that does not fit."""

INITIAL_VERSION = "default"

Params = Any


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What the engine is asked to be.

    Attributes:
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: slots, the number of requests decoded at once.
        max_logprobs: most log-probs per token that a request may ask for.
        dtype: compute dtype, ``"float32"`` or ``"bfloat16"``.
    """

    max_model_len: int
    max_num_seqs: int = 32
    max_logprobs: int = 20
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot for ``/metrics`` and ``/is_paused``, replaced as a whole after every step."""

    running: int = 0
    waiting: int = 0
    live_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    paused: bool = False
    version: str = INITIAL_VERSION


class Engine:
    """Generates for many requests at once.

    Args:
        config: the model.
        params: its parameters in the compute dtype (NumPy or JAX arrays).
        options: see ``EngineOptions``.
    """

    def __init__(self, config: ModelConfig, params: Params, options: EngineOptions):
        self.config, self.options = config, options
        self.stats = EngineStats()
        self._params = jax.device_put(params)
        self._scheduler = Scheduler(options.max_num_seqs)
        self._lanes = Lanes(options.max_num_seqs)
        self._cache: kernels.KVCache | None = None
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ajgrpo-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; open requests fail with ServerError."""

        def stop() -> None:
            self._stopped = True

        self._call(stop)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after a failure, whose traceback went to the log."""
        return self._thread.is_alive()

    def submit(self, prompt: list[int], params: SamplingParams) -> Future[Generation]:
        """Queues a validated request. Cancelling the future before it is done abandons the generation."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        room = self.options.max_model_len - len(prompt)
        generation = Generation(
            prompt=prompt,
            params=dataclasses.replace(params, seed=seed),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=frozenset(params.stop_token_ids + (() if params.ignore_eos else self.config.eos_token_ids)),
        )

        def forget_if_cancelled(future: Future[Generation]) -> None:
            if future.cancelled():
                self._call(lambda: self._release(generation))

        generation.future.add_done_callback(forget_if_cancelled)
        self._put(Call(lambda: self._scheduler.submit(generation), generation.future, done=False))
        return generation.future

    def pause(self) -> Future[None]:
        """Stops decoding, drops the cache and keeps the requests."""

        def pause() -> None:
            self._update_stats(paused=True)
            self._drop_cache()

        return self._call(pause)

    def resume(self) -> Future[None]:
        """Goes on; interrupted requests are recomputed."""
        return self._call(lambda: self._update_stats(paused=False))

    def swap_weights(self, params: Params | None, version: str | None) -> Future[None]:
        """Replaces the parameters (None: keeps them) and the label of tokens drawn from now on (None: keeps it)."""

        def swap() -> None:
            if params is not None:
                self._params = jax.device_put(params)
                self._drop_cache()
            self._update_stats(version=self.stats.version if version is None else version)

        return self._call(swap)

    # The inbox: any thread puts, the engine's thread takes.

    def _call(self, action: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._put(Call(action, future, done=True))
        return future

    def _put(self, call: Call) -> None:
        self._inbox.put(call)
        if not self.alive:
            self._fail_inbox()

    def _take_inbox(self, wait: bool) -> None:
        while True:
            try:
                call = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            call.run()

    def _fail_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _fail(self._inbox.get_nowait().future)

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take_inbox(wait=not self._has_work)
                if self._has_work and not self._stopped:
                    self._step()
                self._update_stats()
        finally:
            # After a failure too: nobody may wait for ever. The traceback itself goes to the log.
            for generation in (*self._scheduler.running.values(), *self._scheduler.waiting):
                _fail(generation.future)
            self._stopped = True
            self._fail_inbox()

    @property
    def _has_work(self) -> bool:
        return not self.stats.paused and bool(self._scheduler.running or self._scheduler.waiting)

    def _step(self) -> None:
        fresh = not self._scheduler.running
        admitted = self._scheduler.admit()
        for generation in admitted:
            self._lanes.fill(generation)
        cache = self._reserve(fresh)
        for row in pack_rows(segments(admitted), PREFILL_ROW_TOKENS):
            cache = self._prefill(cache, row)
        inputs = self._lanes.inputs()
        running = self._scheduler.running.values()
        self._cache, drawn = kernels.decode(
            self.config,
            self._params,
            cache,
            inputs,
            num_top=num_top(running, self.config.vocab_size),
            num_candidates=num_candidates(running, self.config.vocab_size),
        )
        self._hand_out(jax.tree.map(np.asarray, drawn))

    def _reserve(self, fresh: bool) -> kernels.KVCache:
        """A cache long enough for the running sequences; ``fresh``: nothing in the present one is needed."""
        length = round_up(self._scheduler.longest, CACHE_STEP, self.options.max_model_len)
        cache, self._cache = self._cache, None  # the kernels take it over (donation)
        present = 0 if cache is None else cache.k.shape[3]
        if cache is None or (fresh and present != length):
            return kernels.empty_cache(self.config, self.options.max_num_seqs, length, jnp.dtype(self.options.dtype))
        return kernels.grow_cache(cache, length) if present < length else cache

    def _prefill(self, cache: kernels.KVCache, row: list[Segment]) -> kernels.KVCache:
        """Fills the slots of the row's segments."""
        total = sum(len(segment.tokens) for segment in row)
        size = round_up(total, PREFILL_STEP, max(PREFILL_ROW_TOKENS, self.options.max_model_len))
        inputs = prefill_row(row, size, self.options.max_num_seqs)
        cache = kernels.prefill(self.config, self._params, cache, inputs)
        for segment in row:
            for slot in segment.slots[1:]:
                cache = kernels.copy_slot(cache, np.int32(segment.slots[0]), np.int32(slot))
        self._count(prompt_tokens=total)
        return cache

    def _hand_out(self, drawn: Drawn) -> None:
        """Appends each slot's token to its request, and completes those that are done."""
        tokens, log_probs = drawn.token.tolist(), drawn.log_prob.tolist()
        running = list(self._scheduler.running.items())
        for slot, generation in running:
            generation.tokens.append(tokens[slot])
            generation.log_probs.append(log_probs[slot])
            generation.mark_version(self.stats.version)
            if generation.params.logprobs:
                generation.top.append((drawn.top_ids[slot], drawn.top_log_probs[slot]))
            if generation.truncates:
                row = drawn.candidates[slot]
                generation.candidates.append(row[row >= 0].tolist())
        self._lanes.advance(drawn.token)
        done = [generation for _, generation in running if generation.finish_reason is not None]
        for generation in done:
            self._release(generation)
        self._count(generation_tokens=len(running), finished=len(done))
        self._update_stats()  # before the replies: who has one must not find it among the running
        for generation in done:
            if generation.future.set_running_or_notify_cancel():
                generation.future.set_result(generation)

    def _release(self, generation: Generation) -> None:
        if generation.slot is not None:
            self._lanes.clear(generation.slot)
        self._scheduler.release(generation)

    def _drop_cache(self) -> None:
        self._count(preemptions=self._scheduler.preempt_all())
        self._lanes.clear(slice(None))
        self._cache = None

    def _update_stats(self, **changes: Any) -> None:
        counts: dict[str, Any] = {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "live_tokens": self._scheduler.live_tokens,
        }
        self.stats = dataclasses.replace(self.stats, **counts, **changes)

    def _count(self, **increments: int) -> None:
        totals: dict[str, Any] = {name: getattr(self.stats, name) + value for name, value in increments.items()}
        self.stats = dataclasses.replace(self.stats, **totals)


@dataclasses.dataclass(frozen=True)
class Call:
    """Something for the engine's thread to do; with ``done``, doing it is what completes the future."""

    action: Callable[[], None]
    future: Future[Any]
    done: bool

    def run(self) -> None:
        """Runs in the engine's thread. A failure ends the thread, but never leaves the caller waiting."""
        succeeded = False
        try:
            self.action()
            succeeded = True
        finally:
            if not succeeded:
                _fail(self.future)
        if self.done:
            self.future.set_result(None)


def _fail(future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(ServerError("the engine has stopped; its log says why"))
