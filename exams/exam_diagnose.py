"""The exam of diagnose: mistakes it must place and name, rewrites it must not accuse (``make exam-diagnose``).

Every mistake is made in one middle layer of tiny and in all. Right is: the first finding is at the mistake's point, in
the first faulty layer (of all layers the second will do: a mistake may be too small in one), of its class, and it
names the cause where that is among the variants. Every mistake is also made in a ``Program`` of tiny
(exams/as_program.py), which must have the same finding, and its gate must fail. A cell is a row of
exams/results/exam-diagnose.jsonl.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from exams.as_program import diagnosed
from exams.cut import Cut, add_part
from exams.mistakes import MISTAKES, TEXT, Mistake, placed
from exams.pairs import Pair, pairs
from exams.rewrites import REWRITES, points, rewritten
from precaudit.diagnosis.diagnose import Diagnosis, diagnose
from precaudit.diagnosis.evidence.records import Finding
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

MIDDLE = 2
NOTHING = ("", "", "nothing found")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Cell:
    """One mistake and what diagnosis said of it."""

    mistake: str
    layers: str
    wanted: tuple[str, str, str]
    found: tuple[str, str, str]
    layer: int | None
    explained: float | None
    second: str
    findings: int
    at: int | None
    as_program: tuple[tuple[str, str, str], int | None, int] | None = None  # what was found, its layer, gate's exit

    @property
    def right(self) -> bool:
        """Whether place, class and cause are right."""
        return self.found == self.wanted and self.layer in self._first

    @property
    def right_as_program(self) -> bool:
        """Whether they are in the program, too, and its gate fails; true where it was not asked."""
        if self.as_program is None:
            return True
        found, layer, code = self.as_program
        return found == self.wanted and layer in self._first and code == 1

    @property
    def _first(self) -> set[int | None]:
        return {"middle": {MIDDLE}, "all": {0, 1}, "own": {self.at}}[self.layers]


def traced(
    folder: Path, subject: Subject, texts: tuple[str, ...] = (TEXT,), steps: int = 2, recorded: str = "all"
) -> Diagnosis:
    """Trace the points that are ``recorded`` of a subject over texts in one batch and diagnose it."""
    select = Selection.parse(points=recorded, phases="prefill,decode")
    prompts = [Prompt(id=name, prompt=text) for name, text in zip("abcd", texts, strict=False)]
    with placed():
        run = trace(
            subject, folder / "run", prompts, select, TraceOptions(force=True, decode_steps=steps, batch=len(texts))
        )
        # a selection: findings alone, no shares in logits, no remedies
        return diagnose(run, select, CompareOptions(accum=(), cache=folder / "refs"), subject=subject)


def cell(folder: Path, mistake: Mistake, layers: str, program: bool = False) -> Cell:
    """Make a mistake in the middle layer or in all, and ask; ``program``: of a program, too."""
    where = MIDDLE if layers == "middle" else None
    found = traced(folder, mistake.subject(where), mistake.prompts, mistake.steps).findings
    cause = mistake.cause or "none reproduces it"
    if found and mistake.seen_by is not None and found[0].cause == mistake.seen_by:
        cause = mistake.seen_by
    wanted = (mistake.point, mistake.kind, cause)
    beside = _of_program(folder, mistake, where) if program else None
    if not found:
        return Cell(mistake.name, layers, wanted, NOTHING, None, None, "", 0, mistake.at, beside)
    f: Finding = found[0]
    explained = None if f.explained is None else float(f.explained)
    second = "" if f.second is None else f"{f.second[0]} {float(f.second[1]):.3f}"
    return Cell(
        mistake.name, layers, wanted, (f.point, f.kind, f.cause), f.layer, explained, second, len(found), mistake.at,
        beside,
    )  # fmt: skip


def _of_program(folder: Path, mistake: Mistake, layer: int | None) -> tuple[tuple[str, str, str], int | None, int]:
    """Return the first finding of a mistake's program, its layer, and what gate exits with."""
    made = diagnosed(folder, mistake, layer)
    if not made.findings:
        return NOTHING, None, made.gate
    f = made.findings[0]
    return (f.point, f.kind, f.cause), f.layer, made.gate


def both(folder: Path, pair: Pair) -> tuple[bool, str]:
    """Make two mistakes in the middle layer; return whether both are named there, and what was found."""
    found = traced(folder, pair.subject(MIDDLE)).findings
    told = {(f.point, f.kind, f.cause) for f in found if f.layer == MIDDLE}
    return pair.wanted() <= told, "; ".join(f"{f.kind}: {f.cause} at {f.point} of {f.layer}" for f in found)


def say(right: bool, line: str) -> None:
    """Print a cell as soon as it is made."""
    print("right" if right else "WRONG", line, flush=True)


def harmless(folder: Path, policy: str, name: str) -> tuple[int, str]:
    """Diagnose an honest program; return the exit code and the first finding."""
    found = traced(folder, rewritten(name, policy), recorded=points(name))
    return found.exit_code, found.findings[0].cause if found.findings else "; ".join(found.unknown)


def mistakes() -> list[tuple[Mistake, str]]:
    """Return (mistake, in which layers it is made)."""
    return [(m, layers) for m in MISTAKES for layers in (("own",) if m.whole else ("middle", "all"))]


def rewrites() -> list[tuple[str, str]]:
    """Return (policy, name) of the honest programs."""
    return list(product(("bf16", "fp32-highest"), REWRITES))


def asked(folder: Path, only: str, part: Cut, program: bool) -> Iterator[tuple[str, bool, Cell | None]]:
    """Ask; yield (kind, whether it is right, what is kept of a mistake)."""
    for mistake, layers in part.of([m for m in mistakes() if only in m[0].name]):
        c = cell(folder, mistake, layers, program)
        share = "" if c.explained is None else f"{c.explained:.4f}"
        where = f"layer {c.layer} {c.found[0]}"
        say(
            c.right, f"{c.mistake:28} {c.layers:6} {where:20} {c.found[1]:9} {c.found[2]:26} {share:7} {c.second}",
        )  # fmt: skip
        yield "mistakes", c.right, c
        if c.as_program is not None:
            told, layer, code = c.as_program
            say(
                c.right_as_program,
                f"{'  as a program':35} layer {layer} {told[0]:12} {told[1]:9} {told[2]:26} gate {code}",
            )
            yield "programs", c.right_as_program, None
    for pair in part.of([p for p in pairs() if only in p.name]):
        right, told = both(folder, pair)
        say(right, f"pair: {pair.name}: {told}")
        yield "pairs", right, None
    for policy, name in part.of([] if only else rewrites()):
        code, told = harmless(folder, policy, name)
        say(code == 0, f"harmless: {f'{policy}, {name}':36} exit {code} {told}")
        yield "rewrites", code == 0, None


def main() -> int:
    """Ask; return 1 where a cell is wrong or none was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mistakes and pairs whose name holds this, and no rewrites")
    parser.add_argument("--models", action="store_true", help="ask of models' runs alone, not of programs")
    add_part(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        answers = list(asked(Path(name), given.only, given.part, not given.models))
    cells = [c for _, _, c in answers if c is not None]
    RESULTS.mkdir(exist_ok=True)
    whole = given.part.parts == 1 and not given.only
    (RESULTS / ("exam-diagnose.jsonl" if whole else "exam-diagnose-part.jsonl")).write_text(
        "".join(json.dumps(asdict(c) | {"right": c.right}) + "\n" for c in cells)
    )
    confusion = Counter((c.wanted[1], c.found[1] or "nothing") for c in cells)
    print("\nclass made, class found, cells")
    for (made, found), n in sorted(confusion.items()):
        print(f"{made:12} {found:12} {n}")
    kinds, wrong = Counter(kind for kind, _, _ in answers), sum(not right for _, right, _ in answers)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("mistakes", "programs", "pairs", "rewrites"))
    print(f"part {given.part}: {counts}, {wrong} wrong")
    return 1 if wrong or not answers else 0


if __name__ == "__main__":
    sys.exit(main())
