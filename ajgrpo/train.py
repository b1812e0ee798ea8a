"""``python -m ajgrpo.train``: parses and checks the command line, then imports the trainer and runs it.

Exit status: 0 done, 1 training failed, 2 the configuration cannot work, 130 interrupted (after the trainer saved).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ajgrpo import cli
from ajgrpo.errors import AjgrpoError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's own) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = cli.parse(arguments)
        if command.run is None:
            print(cli.help_text(), end="")
            return 0
        return _run(command.flags, command.run)
    except AjgrpoError as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        else:
            print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(flags: frozenset[str], run: cli.RunConfig) -> int:
    if "print_config" in flags:
        print(cli.config_text(run), end="")
        return 0
    # Rewards, tools and environments live beside the configuration. The rollout worker inherits this path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if "dry_run" in flags:
        from ajgrpo.dry_run import dry_run

        return dry_run(run)
    return _train(run)


def _train(run: cli.RunConfig) -> int:
    from ajgrpo import parts, plots

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ajgrpo").setLevel(logging.INFO)
    arguments = parts.trainer_arguments(run)
    result = parts.trainer_class(run)(**arguments).train(resume_from_checkpoint=run.resume_from_checkpoint)
    picture = plots.plot_reward_curve(result.metrics_path, Path(run.training.output_dir) / "reward_curve.png")
    print(f"trained {result.global_step} steps")
    for name, path in (("checkpoint", result.checkpoint_dir), ("metrics", result.metrics_path), ("picture", picture)):
        if path is not None:
            print(f"{name + ':':<12}{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
