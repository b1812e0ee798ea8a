"""Where a trained model goes: a directory in Hugging Face format, and the hub."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError
from ajgrpo.hf import io

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"


def write_companions(directory: Path, model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes what stands beside the weights: the tokenizer, and the generation settings of ``model_dir``."""
    tokenizer.save_pretrained(directory)
    generation = model_dir / io.GENERATION_CONFIG
    if generation.exists():
        shutil.copy(generation, directory)


def upload_model(config: AsyncGRPOConfig, save_model: Callable[[Path], None], message: str, **kwargs: Any) -> str:
    """Uploads what ``save_model`` writes to ``config.hub_model_id``; returns the commit's address.

    Args:
        save_model: writes the model into the directory that it is given.
        message: the commit's message.
        kwargs: options of ``huggingface_hub.HfApi.upload_folder``.

    Raises:
        ConfigError: ``hub_model_id`` is not set.
    """
    from huggingface_hub import HfApi

    if config.hub_model_id is None:
        raise ConfigError("push_to_hub needs hub_model_id (for example 'my-name/my-model')")
    api = HfApi(token=config.hub_token)
    api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        save_model(folder)
        commit = api.upload_folder(repo_id=config.hub_model_id, folder_path=folder, commit_message=message, **kwargs)
    return str(commit.commit_url)


def check_writable(directory: Path) -> None:
    """Makes the output directory.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as exc:
        raise ConfigError(f"output_dir={str(directory)!r} cannot be written: {exc.strerror}; set another one") from exc


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Keeps the output directory to this process for the ``with`` block; the lock ends with the process at the latest.

    Raises:
        ConfigError: another run is using it.
    """
    with (directory / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.seek(0)
            holder = file.read() or "unknown"
            raise ConfigError(
                f"output_dir={str(directory)!r} is in use by another run ({holder}); wait for its end or set another"
            ) from exc
        except OSError as exc:
            logger.warning("the file system of %s has no locks (%s): see to it that one run uses it", directory, exc)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
