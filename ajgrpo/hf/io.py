"""Model directories in Hugging Face format: reading and writing them, one tensor at a time.

Host memory: loading holds one leaf (a parameter stacked over the layers) and one tensor besides what ``place`` keeps;
saving holds one tensor. Neither imports torch.

Left out: tokenizers, ``*.bin`` checkpoints, and arrays that other processes hold (gather them first).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ajgrpo.errors import CheckpointError
from ajgrpo.hf import mapping
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import Params
from ajgrpo.weights.base import TensorSpec

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{number:05d}-of-{count:05d}.safetensors"
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""What a model needs from the hub: weights, configuration and tokenizer."""

MAX_SHARD_BYTES = 5 * 10**9

DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""How safetensors spells the dtypes that are written."""

READABLE = (*DTYPE_CODES.values(), "F64")

NUMPY_DTYPES = {name: np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name)) for name in DTYPE_CODES}

Place = Callable[[mapping.Path, np.ndarray], Any]
"""``place(path, leaf)``: what the parameter tree holds instead of the finished NumPy leaf, such as device arrays."""


def resolve_model(name_or_dir: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The directory of a model: ``name_or_dir`` itself, or the local copy of a hub repository, downloaded if need be.

    Args:
        name_or_dir: a directory, or a hub id such as ``"Qwen/Qwen3-0.6B"``.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: it is neither.
    """
    directory = Path(name_or_dir).expanduser()
    if directory.is_dir():
        return directory
    # Importing the hub client takes a while, and models in directories do without.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = huggingface_hub.snapshot_download(str(name_or_dir), revision=revision, allow_patterns=list(HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"model {str(name_or_dir)!r} is no directory, and the hub does not give it{at}: {exc}"
        ) from exc
    return Path(found)


def read_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], ModelConfig]:
    """The content of ``config.json``, and what the decoder makes of it and of ``generation_config.json``.

    Raises:
        CheckpointError: the file is missing or broken.
        UnsupportedModelError: the model is not implemented.
    """
    directory = Path(directory)
    config = _read_json(directory / CONFIG)
    generation = directory / GENERATION_CONFIG
    return config, ModelConfig.from_hf(config, _read_json(generation) if generation.exists() else None)


def load_params(
    directory: str | os.PathLike[str], config: ModelConfig, *, dtype: str, place: Place | None = None
) -> Params:
    """Reads a checkpoint's weights into the parameter tree.

    All names and shapes are checked before any tensor is read. Leaves are read one after the other, so with a ``place``
    that moves them to devices the host never holds the whole model.

    Args:
        directory: the model's directory.
        config: see ``read_config``.
        dtype: dtype of the leaves: float32, bfloat16, float16, or auto for the one that ``config.json`` states.
        place: called with each leaf as soon as it is complete; default: the NumPy leaf stays.

    Raises:
        KeyMismatchError: missing, unexpected or misshaped tensors, all of them.
        CheckpointError: the directory holds no safetensors, or they cannot be read.
    """
    directory = Path(directory)
    target = NUMPY_DTYPES[config.dtype if dtype == "auto" else dtype]
    leaves = {}
    with _open_tensors(directory) as tensors:
        headers = {name: tensors[name].get_slice(name) for name in tensors}
        mapping.check_tensors(config, {name: tuple(h.get_shape()) for name, h in headers.items()}, str(directory))
        if strange := [f"{name} ({h.get_dtype()})" for name, h in headers.items() if h.get_dtype() not in READABLE]:
            raise CheckpointError(f"{directory}: only {', '.join(READABLE)} tensors are read: {', '.join(strange)}")
        for path, slots in mapping.leaf_slots(config).items():
            leaf = mapping.new_leaf(config, path, target)
            for slot in slots:
                slot.fill(leaf, tensors[slot.name].get_tensor(slot.name))
            leaves[path] = leaf if place is None else place(path, leaf)
        if config.tie_word_embeddings and mapping.HEAD_NAME in tensors:
            head, embedding = (tensors[n].get_tensor(n) for n in (mapping.HEAD_NAME, mapping.EMBEDDING_NAME))
            mapping.check_redundant_head(head, embedding, str(directory))
    return mapping.unflatten(leaves)


def save_checkpoint(
    directory: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    config: ModelConfig,
    params: Params,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    write_extras: Callable[[Path], None] | None = None,
) -> None:
    """Writes a model directory that transformers and vLLM load.

    A new directory appears with a single rename. In an existing one other files are left alone, ``config.json`` goes
    first and comes back last: a directory that holds it is whole.

    Args:
        directory: where to; parents are made.
        config_dict: the content of ``config.json``; its dtype is set to the one written.
        config: the model.
        params: the parameter tree, NumPy or JAX arrays.
        dtype: dtype of the tensors; None: the one that ``config`` states.
        max_shard_bytes: most bytes of tensors in a file; only a larger single tensor exceeds it.
        write_extras: writes further files (tokenizer, ``generation_config.json``) into the directory it is given,
            which becomes ``directory``.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    directory, dtype = Path(directory), dtype or config.dtype
    parent, prefix = (directory, "") if directory.exists() else (directory.parent, f".{directory.name}")
    temporary = parent / f"{prefix}.saving-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed and had the same id
        temporary.mkdir(parents=True)
        try:
            _write_weights(temporary, config, params, dtype, max_shard_bytes)
            spelling = "torch_dtype" if "torch_dtype" in config_dict else "dtype"
            _write_json(temporary / CONFIG, {**config_dict, spelling: dtype})
            if write_extras is not None:
                write_extras(temporary)
            _publish(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(f"cannot write a checkpoint to {directory}: {exc}") from exc


def _publish(temporary: Path, directory: Path) -> None:
    if not directory.exists():
        temporary.rename(directory)
        return
    for stale in (directory / CONFIG, directory / INDEX, *directory.glob("model*.safetensors")):
        stale.unlink(missing_ok=True)
    for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == CONFIG):
        target = directory / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)


def _write_weights(directory: Path, config: ModelConfig, params: Params, dtype: str, max_shard_bytes: int) -> None:
    shards = plan_shards(mapping.checkpoint_manifest(config, dtype), max_shard_bytes)
    tensors = mapping.iter_checkpoint(config, params, dtype)
    for name, specs in shards.items():
        _write_shard(directory / name, specs, tensors)
    if len(shards) > 1:
        total = sum(spec.nbytes for specs in shards.values() for spec in specs)
        weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def plan_shards(manifest: list[TensorSpec], max_shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """Which tensors go into which file, in the order of the manifest."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in manifest:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {SHARD.format(number=i + 1, count=len(shards)): specs for i, specs in enumerate(shards)}


def _write_shard(path: Path, specs: list[TensorSpec], tensors: Iterator[tuple[str, Any]]) -> None:
    """Writes a safetensors file: 8 bytes header length, JSON header, data. Takes ``len(specs)`` items of ``tensors``.

    The library's own writer wants all tensors at once; here each goes to its offset as it comes. Offsets follow the
    names' order, as the library has it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        starts[spec.name], end = end, end + spec.nbytes
        offsets = [starts[spec.name], end]
        header[spec.name] = {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec, (name, tensor) in zip(specs, tensors, strict=False):
            assert spec.name == name, f"the stream gave {name} where the manifest has {spec.name}"
            file.seek(8 + len(text) + starts[name])
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """For each tensor of the directory the open file that holds it."""
    files = _weight_files(directory)
    try:
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(safe_open(file, framework="numpy")) for file in files]
            yield {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as exc:
        raise CheckpointError(f"{directory}: a safetensors file cannot be read: {exc}") from exc


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).exists():
        files = [directory / name for name in sorted(set(_read_json(directory / INDEX)["weight_map"].values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise CheckpointError(f"{directory}: {INDEX} names files that are missing: {', '.join(missing)}")
        return files
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    hint = f"; it holds {', '.join(other)}: convert them, only safetensors are read" if other else ""
    raise CheckpointError(f"{directory} holds neither {WEIGHTS} nor {INDEX}{hint}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"cannot read {path}: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
