"""Checkpoints on disk: a Hugging Face model that anything loads, and beside it what a resumed run needs.

    <output_dir>/checkpoint-40/
        config.json  model*.safetensors  tokenizer…     the model, in the compute dtype
        train_state/                                    orbax: master parameters, optimizer state, step
        rollout_state.json                              {"next_prompt_index": 161}
        trainer_state.json                              {"global_step": 40, "num_tokens": 81920, "run_id": "1f0c…", …}

A checkpoint is written under a name ending in ``.partial`` and renamed when it is complete, so that a directory called
``checkpoint-N`` is always whole. Several runs may have written into one directory: a run deletes only its own
checkpoints, and moves another's aside (``checkpoint-40.1``) where it needs the name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ajgrpo.errors import CheckpointError
from ajgrpo.training.step import TrainState

TRAIN_STATE = "train_state"
ROLLOUT_STATE = "rollout_state.json"
TRAINER_STATE = "trainer_state.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """How far a run has come, apart from its arrays.

    Attributes:
        global_step: optimizer steps done.
        num_tokens: tokens forwarded so far.
        next_prompt_index: the first prompt not yet trained, counted over all epochs.
        run_id: names the run whose checkpoints these are; a resumed run keeps it.
    """

    global_step: int = 0
    num_tokens: int = 0
    next_prompt_index: int = 0
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


def save_checkpoint(
    output_dir: Path,
    progress: RunProgress,
    state: TrainState | None,
    write_model: Callable[[Path], None],
    *,
    keep: int | None = None,
) -> Path:
    """Writes ``checkpoint-<global_step>`` and deletes the run's oldest ones beyond ``keep``.

    Args:
        output_dir: the run's directory.
        progress: written as ``trainer_state.json`` and ``rollout_state.json``.
        state: arrays to resume from; None leaves them out (``save_only_model``).
        write_model: called with the directory; writes the model and the tokenizer.
        keep: how many checkpoints of this run stay, at least 1; None: all.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the directory cannot be written; what was written so far is removed.
    """
    final = output_dir / f"checkpoint-{progress.global_step}"
    partial = final.with_name(final.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_model(partial)
        if state is not None:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((partial / TRAIN_STATE).absolute(), _as_dict(state))
                checkpointer.wait_until_finished()
        _write_json(partial / ROLLOUT_STATE, {"next_prompt_index": progress.next_prompt_index})
        _write_json(
            partial / TRAINER_STATE,
            {
                "global_step": progress.global_step,
                "num_tokens": progress.num_tokens,
                "run_id": progress.run_id,
                "saved_at": time.time(),
            },
        )
        if final.exists():
            _make_way(final, progress.run_id)
        os.replace(partial, final)
    except OSError as exc:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk must not stay full
        raise CheckpointError(f"cannot write the checkpoint {final}: {exc}; free space or set output_dir") from exc
    if keep is not None:
        own = [path for path in checkpoints(output_dir) if _origin(path)[1] == progress.run_id]
        for old in own[:-keep]:
            shutil.rmtree(old)
    return final


def _make_way(path: Path, run_id: str) -> None:
    """Frees a checkpoint's name: deletes the run's own, moves another run's aside."""
    if _origin(path)[1] == run_id:
        shutil.rmtree(path)
        return
    taken = len(list(path.parent.glob(f"{path.name}.[0-9]*")))
    path.rename(path.with_name(f"{path.name}.{taken + 1}"))


def load_train_state(directory: Path, shapes: TrainState, shardings: TrainState) -> TrainState:
    """Reads the arrays of a checkpoint straight into their place on the mesh.

    Raises:
        CheckpointError: there are none, or they belong to another model or optimizer.
    """
    path = directory / TRAIN_STATE
    if not path.is_dir():
        raise CheckpointError(
            f"{directory} holds no {TRAIN_STATE}/, so training cannot resume from it (written with "
            "save_only_model=True?); pass it as `model` to start a fresh run from its weights"
        )
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path.absolute(), _as_dict(target))
    except Exception as exc:  # orbax raises bare Exception for a damaged file
        lines = str(exc.__cause__ or exc).strip().splitlines()
        raise CheckpointError(
            f"{path} cannot be read into this run's model and optimizer: the model, `optim` or `dtype` differs from "
            "that of the run that wrote it, or files are missing or damaged. Resume with the settings that it was "
            f"written with, or from an older checkpoint. Reported: {lines[0][:300] if lines else type(exc).__name__}"
        ) from exc
    return TrainState(**restored)


def load_progress(directory: Path) -> RunProgress:
    """Reads how far the checkpointed run had come."""
    try:
        trainer = json.loads((directory / TRAINER_STATE).read_text())
        rollout = json.loads((directory / ROLLOUT_STATE).read_text())
        values = {
            "global_step": trainer["global_step"],
            "num_tokens": trainer["num_tokens"],
            "next_prompt_index": rollout["next_prompt_index"],
        }
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as exc:
        raise CheckpointError(f"{directory} is not a training checkpoint: {type(exc).__name__}: {exc}") from exc
    if wrong := {name: value for name, value in values.items() if type(value) is not int or value < 0}:
        raise CheckpointError(f"{directory} is not a training checkpoint: these must be whole numbers: {wrong}")
    # Checkpoints of earlier versions name no run: they stay when this run deletes its oldest ones.
    run_id = trainer.get("run_id")
    return RunProgress(**values, run_id=run_id) if isinstance(run_id, str) else RunProgress(**values)


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints below ``output_dir``, of all runs, in the order in which they were written."""
    found = []
    if output_dir.is_dir():
        for path in output_dir.iterdir():
            if (match := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir():
                found.append((_origin(path)[0], int(match[1]), path))
    return [path for *_, path in sorted(found)]


def _origin(path: Path) -> tuple[float, str | None]:
    """When a checkpoint was written (Unix time), and by which run, as far as it tells."""
    try:
        trainer = json.loads((path / TRAINER_STATE).read_text())
        return float(trainer["saved_at"]), str(trainer["run_id"])
    except (OSError, KeyError, TypeError, ValueError):
        return path.stat().st_mtime, None


def find_checkpoint(resume: str | bool, output_dir: Path) -> Path:
    """The checkpoint to resume from: the one written last (``True``) or the named directory.

    Raises:
        CheckpointError: there is none.
    """
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise CheckpointError(f"resume_from_checkpoint={resume!r} is not a directory")
        return Path(resume)
    found = checkpoints(output_dir)
    if not found:
        raise CheckpointError(f"resume_from_checkpoint=True, but {output_dir} holds no checkpoint-N directory")
    return found[-1]


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
