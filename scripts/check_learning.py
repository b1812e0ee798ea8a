"""Checks that a run learned: the mean reward of its last tenth exceeds that of its first tenth by a margin.

    python scripts/check_learning.py runs/quickstart/metrics.jsonl [--margin 0.25]

Exit status 1 when it did not. The check can fail: a run with the sign of the advantages flipped does not pass
(``--loss tests.flipped.loss``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ajgrpo.loggers import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--margin", type=float, default=0.25)
    args = parser.parse_args()
    records = read_metrics(args.metrics)
    tenth = max(1, records[-1]["step"] // 10)
    rewards = [(record["step"], record["reward"]) for record in records if record.get("reward") is not None]
    first = [reward for step, reward in rewards if step <= tenth]
    last = [reward for step, reward in rewards if step > records[-1]["step"] - tenth]
    before, after = sum(first) / len(first), sum(last) / len(last)
    learned = after - before >= args.margin
    print(
        f"first tenth {before:.3f}, last tenth {after:.3f}, gain {after - before:+.3f}: {'ok' if learned else 'FAILED'}"
    )
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
