"""A program's run once more: does it give the same bits twice."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import recorded_entries
from precaudit.recording.programs.loading import program_of
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.resuming import STRICTLY
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.schema.brief import Brief
from precaudit.schema.policies import announced_policy

KINDS = ("taps", "outputs")  # the files of a call that hold what the program made
At = tuple[str, str, int, str]  # case, phase, call, tensor


@dataclass(frozen=True, repr=False)
class ProgramRepeat(Brief):
    """The new run, how many tensors both hold, and the first of those that differ, as the run lists them."""

    run: Opened
    tensors: int
    differing: int
    first: At | None

    @property
    def where(self) -> str | None:
        """The first tensor that differs, in words; None where none does."""
        return None if self.first is None else "{3} ({0}, {1} {2})".format(*self.first)


def repeat_program(
    run: Opened | Path | str, output: Path | str, program: Program | str | None = None, force: bool = False,
    tell: Advance = silent,
) -> ProgramRepeat:  # fmt: skip
    """Trace what a program's run recorded again, as it was recorded, into ``output``, and compare every tensor's bits.

    ``program``, or its name; without either the one the run names, if this user traced that very source. Raises
    UserError as ``trace_program`` does, and where the program is another than the one that was traced.
    """
    before = run if isinstance(run, Opened) else open_program_run(run)
    record = before.record
    found = program_of(before, program)
    recorded_entries(before, found)
    found = found.some(record.cases)
    if record.policy is not None:
        found = found.announcing(announced_policy(record.policy))
    positions = None if record.then else f"{record.began}:{record.began + record.calls}"
    again = trace_program(
        found, output, record.program, force, f"precaudit trace --repeat {before.folder}", tell, record.layers, None,
        any(w.startswith(STRICTLY) for w in record.warnings), record.taps, record.asked, positions,
        tuple(one.record.entry for one in before.entries),
    )  # fmt: skip
    return _compare(before, again)


def count_differing_values(before: Opened, again: Opened) -> int:
    """Return how many tensors of a program's run are not bit for bit those of another, or not there."""
    return _compare(before, again).differing


def _compare(before: Opened, again: Opened) -> ProgramRepeat:
    """Hold every tensor of a run against the one of its name in the other, bit for bit; one that lacks differs."""
    both, differing = 0, []
    for one, other in zip(before.entries, again.entries, strict=True):
        for case, call in product(one.record.cases, range(one.record.calls)):
            for kind in KINDS if one.record.outputs else KINDS[:1]:
                old, new = (x.tensors(case, call, kind) for x in (one, other))
                for name, x in old.items():
                    y = new.get(name)
                    both += y is not None
                    if y is None or (x.shape, x.dtype) != (y.shape, y.dtype) or x.tobytes() != y.tobytes():
                        differing.append((case, one.record.phase, call, name))
    return ProgramRepeat(again, both, len(differing), differing[0] if differing else None)
