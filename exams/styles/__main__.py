"""Correct programs in the styles that people write, each recorded, compared and judged: none may fail.

python -m exams.styles --only attention
python -m exams.styles --part today/28
"""

import argparse
import time

import jax

from exams.cut import add_part
from exams.styles import attention, formats, losses, mixers, networks, recurrence, serving, solvers, training, updates
from exams.verdicts import judge_program

THEMES = (attention, recurrence, mixers, networks, training, losses, updates, serving, formats, solvers)
EVERY = {f"{m.__name__.rpartition('.')[2]}: {name}": p for m in THEMES for name, p in m.PROGRAMS.items()}


def main() -> int:
    """Print a row a program; 1 unless every verdict of each is a pass, but for what a loop or a branch did not run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose names hold this")
    add_part(parser)
    asked = parser.parse_args()
    wrong = verdicts = 0
    some = asked.part.of([name for name in EVERY if asked.only in name])
    for name in some:
        began = time.perf_counter()
        found = judge_program(EVERY[name])
        counts = ", ".join(f"{n} {status}" for status, n in found.counts.items())
        wrong, verdicts = wrong + (set(found.counts) - {"not run"} != {"pass"}), verdicts + sum(found.counts.values())
        where = "" if found.exit_code == 0 else f"; first {found.verdicts[0].place.text}"
        print(f"{name:45} {counts}{where}, {time.perf_counter() - began:.0f} s", flush=True)
    place = f"jax {jax.__version__}, {jax.devices()[0].platform}, part {asked.part}"
    print(f"{place}: {len(some)} programs, {verdicts:,} verdicts, {wrong} programs with another than pass")
    return int(wrong > 0 or not some)


if __name__ == "__main__":
    raise SystemExit(main())
