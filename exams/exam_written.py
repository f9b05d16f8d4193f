"""The exam's mistakes written into decoders of others' own (``make exam-written``): lines of examples' source.

A mistaken example is traced, compared with its map, gated and diagnosed by the Python API. Nothing is announced: no
policy, no origin of weights. *Right*: the first finding is at the mistake's point, in the first layers, of its class
and by its cause; *noted*: the same of a note, where a format costs no more than rounding; *near*: at its point, by no
cause; *wrong*: any other; *silent*: none. Gate has to fail where there is a finding, and nowhere else; of the twins
without a mistake neither may say anything. exams/results/exam-written.jsonl keeps the rows.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

import precaudit
from exams.cut import add_part
from exams.mistakes import MISTAKES
from exams.written import EXAMPLES, NNX, OWN, Edits, Written, text
from precaudit.references.mapped import Names
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.errors import EmulatedError, ForwardError

DECODERS = {"own_decoder": OWN, "nnx_decoder": NNX}
STEPS = 4
RESULTS = Path(__file__).parent / "results"
Found = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """A mistake in a decoder, and what was said of it: (point of the textbook, class, cause) and the layer.

    ``noted``: what its notes say of formats; ``first``: the first faulty layer.
    """

    decoder: str
    name: str
    wanted: Found
    found: Found | None
    layer: int | None
    gate: int
    says: str
    noted: tuple[Found, ...]
    first: int | None

    @property
    def outcome(self) -> str:
        """One of right, noted, near, wrong, silent."""
        if self.found is None:
            return "noted" if self.wanted in self.noted else "silent"
        placed = self.found[0] == self.wanted[0] and self.layer in (self.first, None if self.first is None else 1)
        if placed and self.found[1:] == self.wanted[1:]:
            return "right"
        return "near" if placed and self.found[2] == "none reproduces it" else "wrong"


def program_of(folder: Path, decoder: str, w: Written, edits: Edits) -> precaudit.Program:
    """Return an example's program from its source with edits: its first case, of few steps."""
    file = folder / f"{decoder}.py"
    file.write_text(text(decoder, edits))
    spec = importlib.util.spec_from_file_location(decoder, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program: precaudit.Program = getattr(module, w.entry)
    case = next(iter(program.cases))
    return replace(program.some([case]), steps=min(STEPS, program.steps))


def names_of(folder: Path, decoder: str, w: Written, mistaken: bool) -> tuple[Names, dict[str, str | dict[str, str]]]:
    """Return an example's map with a mistake's own entries, and what it shows by point of the textbook."""
    config = json.loads((EXAMPLES / f"{decoder}.json").read_text()) | w.config
    (folder / "names.json").write_text(json.dumps(config))
    lines = (EXAMPLES / f"{decoder}.toml").read_text().splitlines()
    entries = w.points | w.shows if mistaken else w.points
    lines = [line for line in lines if line.partition(" = ")[0] not in entries]
    lines += [f"{point} = {shown}" for point, shown in entries.items() if shown]
    map = folder / "names.toml"
    map.write_text("\n".join(lines) + "\n")
    return Names(map, folder / "names.json"), msgspec.toml.decode(map.read_bytes())["points"]


def asked(folder: Path, decoder: str, w: Written, mistaken: bool = True) -> Cell:
    """Audit an example with a mistake, or its twin without it."""
    mistake = next(m for m in MISTAKES if m.name == w.name)
    program = program_of(folder, decoder, w, w.honest + (w.edits if mistaken else ()))
    names, shown = names_of(folder, decoder, w, mistaken)
    opened = precaudit.trace(program, folder / "run", force=True)
    errors = precaudit.compare(opened, program, reference=names)
    code = precaudit.gate(opened.folder).exit_code
    made = precaudit.diagnose(opened, program)
    order = [p for p in POINTS if p in shown]
    at = next(p for p in order if list(POINTS).index(p) >= list(POINTS).index(w.point or mistake.point))
    wanted = (at, mistake.kind, w.cause or mistake.cause or "none reproduces it")
    f = made.findings[0] if made.findings else None
    own = {seen(entry).partition("#")[0]: point for point, entry in shown.items()}
    noted = dict.fromkeys(
        (own.get(e.point.partition("#")[0], e.point), "format", e.narrow.cause)
        for e in of_kinds(errors, EmulatedError, ForwardError)
        if e.narrow is not None
    )
    found = None if f is None else (own.get(f.point.partition("#")[0], f.point), f.kind, f.cause)
    says = "; ".join(f"{f.point} of {f.layer}: {f.says}" for f in made.findings) or "; ".join(made.notes)
    layer = None if f is None else f.layer
    return Cell(decoder, w.name, wanted, found, layer, code, says, tuple(noted), w.layer)


def seen(entry: str | dict[str, str]) -> str:
    """Return the name in a map's entry of a point, without the mark of its occurrences."""
    return (entry if isinstance(entry, str) else entry["name"]).replace("{#}", "")


def rows(only: str = "") -> list[tuple[str, Written]]:
    """Return (decoder, mistake) of those whose ``decoder: name`` holds ``only``."""
    return [(d, w) for d, every in DECODERS.items() for w in every if only in f"{d}: {w.name}"]


def twins(only: str = "") -> list[tuple[str, Written]]:
    """Return (decoder, mistake) of every honest twin, once."""
    found: dict[tuple[str, Edits, str], tuple[str, Written]] = {}
    for d, w in rows(only):
        found.setdefault((d, w.honest, w.entry), (d, w))
    return list(found.values())


def cells(work: list[tuple[str, Written, bool]]) -> Iterator[tuple[Cell, bool]]:
    """Ask and tell; yield each cell, and whether it is of a mistake."""
    for decoder, w, mistaken in work:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            c = asked(Path(folder), decoder, w, mistaken)
        said = c.outcome if mistaken else "ALARM" if c.found is not None or c.gate else "passes"
        point, kind, cause = c.found or ("", "", "")
        name = c.name if mistaken else f"twin of {c.name}"
        took = time.perf_counter() - start
        where = f"layer {c.layer} {point:9}"
        print(f"{decoder:12} {name:32} {said:6} {where} {kind:9} {cause:26} gate {c.gate} {took:3.0f} s", flush=True)
        if said not in ("right", "noted", "passes"):
            print(f"    wanted {c.wanted}; {c.says}", flush=True)
        yield c, mistaken


def main() -> int:
    """Print the table; 1 where a mistake is named wrongly, gate and diagnose differ, or a twin is accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose 'decoder: mistake' holds this")
    add_part(parser)
    given = parser.parse_args()
    work = [(d, w, True) for d, w in given.part.of(rows(given.only))]
    work += [(d, w, False) for d, w in given.part.of(twins(given.only))]
    every = list(cells(work))
    RESULTS.mkdir(exist_ok=True)
    whole = given.part.parts == 1 and not given.only
    made = [c for c, mistaken in every if mistaken]
    for decoder, w, mistaken in work:
        if mistaken and w.note:
            print(f"not as in the exam: {decoder}, {w.name}: {w.note}")
    (RESULTS / ("exam-written.jsonl" if whole else "exam-written-part.jsonl")).write_text(
        "".join(json.dumps(asdict(c) | {"outcome": c.outcome}) + "\n" for c in made)
    )
    told = []
    for decoder in dict.fromkeys(c.decoder for c in made):
        n = Counter(c.outcome for c in made if c.decoder == decoder)
        told.append(
            f"{decoder}: {n['right'] + n['noted']} of {n.total()} named right ({n['noted']} in notes), "
            f"{n['wrong']} wrong, {n['near']} placed, {n['silent']} silent"
        )
    alarms = sum(not mistaken and (c.found is not None or c.gate != 0) for c, mistaken in every)
    apart = sum((c.found is None) != (c.gate == 0) for c in made)
    print(f"part {given.part}: {'; '.join(told)}; gate and diagnose differ on {apart}, {alarms} twins are accused")
    return 1 if alarms or apart or not every or any(c.outcome == "wrong" for c in made) else 0


if __name__ == "__main__":
    sys.exit(main())
