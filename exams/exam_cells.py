"""The exam of cells: faults that diagnosis was never told of must be placed, and none named wrongly.

A cell is traced, compared, gated and diagnosed (``make exam-cells``). Flagged: the gate fails a record at one of its
points, in its layer. Named: a finding there whose name the cell holds for right, or for equal: what says the same of
these values. Wrong: any finding that names something else. A row is kept in exams/results/exam-cells.jsonl.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import process_time

from exams.cells import CELLS, THEMES, Cell
from exams.cut import Cut, add_part
from precaudit.diagnosis.diagnose import diagnose
from precaudit.diagnosis.evidence.records import Finding
from precaudit.judging.gate import gate
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection

RESULTS = Path(__file__).parent / "results"
ONE, BOTH = ("bf16",), ("bf16", "fp32-highest")
SAID = ("right", "equal", "not", "wrong")
THEME = {cell.name: theme for theme, cells in THEMES.items() for cell in cells}


@dataclass(frozen=True)
class Answer:
    """What was said of a cell: ``said`` is the worst of its findings' names, ``told`` the finding that it is of."""

    name: str
    theme: str
    policy: str
    flagged: bool
    said: str
    told: str
    elsewhere: tuple[str, ...]
    seconds: float


def _where(f: Finding) -> str:
    return f"{f.point} of {f.layer}"


def _prompts(cell: Cell) -> list[Prompt]:
    texts = zip("ab", cell.prompts, strict=False)
    if cell.model == "tiny":
        return [Prompt(id=name, prompt=text) for name, text in texts]
    return [Prompt(id=name, tokens=tuple(b % 96 for b in text.encode())) for name, text in texts]


def ask(folder: Path, cell: Cell, policy: str) -> Answer:
    """Trace, compare, gate and diagnose a cell; return what was said."""
    start, subject = process_time(), cell.subject(policy, CELLS)
    select, prompts = Selection.parse(points="all", phases="prefill,decode"), _prompts(cell)
    options = TraceOptions(force=True, decode_steps=cell.steps, batch=len(prompts), pad="left")
    run = trace(subject, folder / "run", prompts, select, options)
    how = CompareOptions(accum=(), cache=folder / "refs")
    failed = [v for v in gate(compare(run, None, select, how)).verdicts if v.status in ("fail", "nonfinite")]
    flagged = any(v.point in cell.points and v.layer == cell.layer for v in failed)
    found = diagnose(run, select, how, subject=subject).findings
    said, told = _said(cell, found)
    elsewhere = tuple(_where(f) for f in found if f.point not in cell.points)
    theme = THEME[cell.name]
    return Answer(cell.name, theme, policy, flagged, said, told, elsewhere, process_time() - start)


def _said(cell: Cell, found: Sequence[Finding]) -> tuple[str, str]:
    """Return what the findings' names are worth, and the finding that says so: a wrong one, wherever it is, first."""
    here = [f for f in found if f.point in cell.points and f.layer in (cell.layer, None)]
    by = {name: [f for f in found if cell.named(f) == name] for name in SAID}
    for name, chosen in (
        ("wrong", by["wrong"]),
        ("right", [f for f in here if f in by["right"]]),
        ("equal", [f for f in here if f in by["equal"]]),
        ("not", here or list(found)),
    ):
        if chosen:
            f = chosen[0]
            share = "" if f.explained is None else f" ({f.explained} explained, {f.equal} equal, shadow {f.shadow})"
            return name, f"{_where(f)}: {f.kind}: {f.cause}: {f.says}{share}"
    return "not", "nothing found"


def asked(cells: Sequence[Cell], policies: Sequence[str]) -> list[tuple[Cell, str]]:
    """Return (cell, policy) of all that can be asked."""
    return [(cell, policy) for cell, policy in product(cells, policies) if policy in cell.policies]


def beside(question: tuple[Cell, str]) -> tuple[str, ...]:
    """Return what questions of one program share: they are asked one after another, and it is compiled once."""
    cell, policy = question
    kind = type(cell.change).__name__, str(getattr(cell.change, "part", "")), str(getattr(cell.change, "bits", ""))
    return (policy, cell.model, str(cell.settings), str(len(cell.prompts)), *kind)


def chosen(questions: Sequence[tuple[Cell, str]], part: Cut) -> list[tuple[Cell, str]]:
    """Return a part of the questions: neighbours, in the order of their programs."""
    n, ordered = len(questions), sorted(questions, key=beside)
    return ordered[n * (part.number - 1) // part.parts : n * part.number // part.parts]


def answers(folder: Path, questions: Sequence[tuple[Cell, str]]) -> Iterator[Answer]:
    """Ask, and print each answer as soon as it is there."""
    for cell, policy in questions:
        a = ask(folder, cell, policy)
        seen = "flagged" if a.flagged else "passed "
        beside = f"; also {', '.join(a.elsewhere)}" if a.elsewhere else ""
        print(f"{seen} {a.said:6} {a.name:44} {a.policy:12} {a.seconds:5.1f} s  {a.told}{beside}", flush=True)
        yield a


def table(found: Sequence[Answer]) -> str:
    """Return a line a theme and one of all: cells, flagged at their place, and how they were named."""
    lines = [f"{'theme':16} {'cells':>6} {'flagged':>8} " + " ".join(f"{name:>7}" for name in SAID)]
    for theme in (*THEMES, "all"):
        rows = [a for a in found if theme in ("all", a.theme)]
        counts = Counter(a.said for a in rows)
        told = " ".join(f"{counts[name]:7}" for name in SAID)
        lines.append(f"{theme:16} {len(rows):6} {sum(a.flagged for a in rows):8} {told}")
    return "\n".join(lines)


def main() -> int:
    """Ask; return 1 where a cell is named wrongly or none was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--themes", default=",".join(THEMES), help="some of " + ", ".join(THEMES))
    parser.add_argument("--all-policies", action="store_true", help="under fp32-highest, too")
    add_part(parser)
    given = parser.parse_args()
    part: Cut = given.part
    themes = given.themes.split(",")
    cells = [c for c in CELLS if given.only in c.name and THEME[c.name] in themes]
    questions = asked(cells, BOTH if given.all_policies else ONE)
    with tempfile.TemporaryDirectory() as name:
        found = list(answers(Path(name), chosen(questions, part)))
    RESULTS.mkdir(exist_ok=True)
    whole = part.parts == 1 and len(cells) == len(CELLS)
    kept = "".join(json.dumps(asdict(a)) + "\n" for a in found)
    (RESULTS / ("exam-cells.jsonl" if whole else "exam-cells-part.jsonl")).write_text(kept)
    print(table(found))
    wrong = sum(a.said == "wrong" for a in found)
    print(f"part {part}: {len(found)} cells, {wrong} named wrongly")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
