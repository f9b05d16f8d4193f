"""The verdicts of a program's run: its error records by the default rule, and what is not there."""

from collections.abc import Container, Iterator

import msgspec

from precaudit.errors import UserError
from precaudit.judging.verdicts import Verdict
from precaudit.programs.runs import Compared, Opened, places
from precaudit.records import PROGRAM_CALL, ErrorRecord, read_lines
from precaudit.store import file_hash


def errors_of(opened: Opened) -> list[ErrorRecord]:
    """Return the error records of a compared run; raises UserError where there are none, or of another run."""
    path, marks = opened.folder / "errors.jsonl", opened.folder / "compared.json"
    if not path.is_file() or not marks.is_file():
        raise UserError(f"{opened.folder} was not compared yet: precaudit compare {opened.folder}")
    try:
        found = msgspec.json.decode(marks.read_bytes(), type=Compared)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{marks}: {error}") from None
    if found.run != file_hash(opened.folder / "program.json") or found.errors != file_hash(path):
        raise UserError(f"{path} is not what compare wrote of this run: precaudit compare {opened.folder}")
    return read_lines(path, ErrorRecord)


def uncovered(opened: Opened, seen: Container[object]) -> Iterator[Verdict]:
    """Yield a missing verdict for every point, step, case and call without an error record."""
    for case in opened.record.cases:
        for call in range(opened.record.calls):
            every = list(places(opened.record.points))
            wanted = [(kind, *place) for kind in ("local", "forward") for place in every]
            wanted += [("forward", p, None) for p in opened.record.outputs]
            for kind, p, layer in wanted:
                if (kind, case, PROGRAM_CALL, call, layer, p.name) not in seen:
                    yield Verdict(
                        status="missing", kind=kind, prompt=case, phase=PROGRAM_CALL, step=call, layer=layer,
                        point=p.name, text="no error record of it",
                    )  # fmt: skip


def notes(opened: Opened) -> list[str]:
    """Return what tapping did to the program's outputs."""
    changed = [n for n in opened.record.neutrality if not n.bitwise]
    if not changed:
        return ["tapping left the outputs as they are, bit for bit"]
    worst = ", ".join(f"{n.case} by up to {n.max_diff}" for n in changed[:3])
    return [f"tapping changed the outputs ({worst}): another honest rounding, or the compiler fused otherwise"]
