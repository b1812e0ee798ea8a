"""``python -m ajgrpo.serve --model DIR``: the embedded rollout server as a process of its own.

The command line is read before anything heavy is imported. When the server accepts connections it prints one line to
standard output, ``READY_PREFIX`` and the address; everything else goes to standard error.

With ``--exit-on-stdin-eof`` the process sends itself SIGTERM when standard input is closed, at any time: it ends with
the process that started it, also while it is still loading.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from ajgrpo.errors import AjgrpoError, ConfigError
from ajgrpo.server.launch import READY_PREFIX

if TYPE_CHECKING:
    from ajgrpo.models.config import ModelConfig
    from ajgrpo.server.engine import Engine

DEFAULT_MAX_MODEL_LEN = 2048
SHUTDOWN_S = 2


def main(argv: list[str] | None = None) -> int:
    """Runs the server until it is interrupted; returns the exit status."""
    args = parser().parse_args(argv)
    if args.exit_on_stdin_eof:
        threading.Thread(target=_exit_on_eof, name="ajgrpo-stdin", daemon=True).start()
    try:
        with listen(args.host, args.port) as listener:
            serve(args, listener)
    except AjgrpoError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m ajgrpo.serve", description="The embedded rollout server.")
    result.add_argument("--model", required=True, help="directory in Hugging Face format, or hub id")
    result.add_argument("--revision", help="revision on the hub")
    result.add_argument("--served-model-name", help="name in requests (default: the value of --model)")
    result.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    result.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    result.add_argument(
        "--max-model-len",
        type=int,
        help=f"longest sequence in tokens (default: the model's own limit, at most {DEFAULT_MAX_MODEL_LEN})",
    )
    result.add_argument("--max-num-seqs", type=int, default=32, help="requests decoded at once (default: %(default)s)")
    result.add_argument("--max-logprobs", type=int, default=20, help="most log-probs per token (default: %(default)s)")
    result.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype")
    result.add_argument("--exit-on-stdin-eof", action="store_true", help="end when standard input is closed")
    return result


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError naming the port and the flag when it is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; set another --port (0: any free one)") from exc
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {exc}") from exc


def serve(args: argparse.Namespace, listener: socket.socket) -> None:
    """Loads the model and answers requests on ``listener`` until interrupted."""
    import uvicorn

    from ajgrpo.server.app import build_app

    engine = build_engine(args)
    engine.start()
    app = build_app(engine, args.served_model_name or args.model)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
    server = uvicorn.Server(config)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"{READY_PREFIX}http://{host}:{port}", flush=True)
    # Whatever prints later belongs in the log: nobody reads the pipe after the line above.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    server.run(sockets=[listener])


def build_engine(args: argparse.Namespace) -> Engine:
    """The engine for the command line's model."""
    from ajgrpo.hf import io
    from ajgrpo.server.engine import Engine, EngineOptions

    directory = io.resolve_model(args.model, args.revision)
    _, config = io.read_config(directory)
    options = EngineOptions(
        max_model_len=context_length(args.max_model_len, config),
        max_num_seqs=args.max_num_seqs,
        max_logprobs=args.max_logprobs,
        dtype=args.dtype,
    )
    return Engine(config, io.load_params(directory, config, dtype=args.dtype), options)


def context_length(asked: int | None, config: ModelConfig) -> int:
    """``--max-model-len`` or its default; raises ConfigError for more than the model can do."""
    limit = min(config.max_position_embeddings, config.length_limit or config.max_position_embeddings)
    if asked is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if not 2 <= asked <= limit:
        raise ConfigError(f"--max-model-len must be from 2 to {limit} for this model, got {asked}")
    return asked


def _exit_on_eof() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    # Before uvicorn runs this ends the process at once, afterwards it is uvicorn's orderly end.
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
