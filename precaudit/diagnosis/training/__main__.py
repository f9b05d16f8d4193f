"""A side of a training in a process of its own: ``python -m precaudit.diagnosis.training FILE.py:NAME FOLDER``."""

import argparse
import sys
from pathlib import Path

from precaudit.diagnosis.training.members import record_side
from precaudit.errors import UserError


def main() -> int:
    """Record a side; return 0, or 2 where it cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", help="the training's program")
    parser.add_argument("folder", type=Path, help="of its run; its chains go beside it")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--like", type=Path, help="a run whose first state it begins with")
    parser.add_argument("--drawn", type=int, default=0, help="correct makings of every step")
    parser.add_argument("--points", help="points to record, by name")
    given = parser.parse_args()
    points = None if given.points is None else given.points.split(",")
    try:
        record_side(given.reference, given.folder, given.steps, given.like, points, given.drawn)
    except UserError as error:
        sys.stderr.write(f"precaudit: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
