"""``python -m ajgrpo.doctor --config FILE``: asks the rollout server whether a run could use it, and prints a table.

Takes the configuration and overrides of ``ajgrpo.train``. Exit status: 0 usable, 1 not, 2 the configuration is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ajgrpo import cli
from ajgrpo.config import EMBEDDED
from ajgrpo.errors import AjgrpoError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's own) and returns the exit status."""
    try:
        command = cli.parse(list(sys.argv[1:] if argv is None else argv))
        if command.run is None:
            print(__doc__)
            return 0
        return examine(command.run)
    except AjgrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def examine(run: cli.RunConfig) -> int:
    """Prints the table; returns 0 when nothing failed, else 1.

    Raises:
        ConfigError: the run starts its server itself.
        CheckpointError: the model or its tokenizer cannot be read.
    """
    from ajgrpo import preflight
    from ajgrpo.dry_run import Checks, print_findings, server_client

    if run.training.vllm_server_base_url == EMBEDDED:
        raise ConfigError("vllm_server_base_url is 'embedded': the trainer starts that server itself; set an address")
    checks = Checks(run)
    needs = preflight.needs_of(run.training, checks.model_config, checks.tokenizer)
    with server_client(run.training) as control:
        return print_findings(preflight.inspect(control, needs), "the rollout server")


if __name__ == "__main__":
    sys.exit(main())
