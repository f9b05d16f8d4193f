"""A program's run once more: does it give the same bits twice."""

from pathlib import Path

from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import recorded_entries
from precaudit.recording.programs.loading import program_of
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.resuming import STRICTLY
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.bits import Repeat, compare_bits
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.recording.tracing.predicting import asked_device, target_of
from precaudit.schema.policies import announced_policy


def repeat_program(
    run: Opened | Path | str,
    output: Path | str,
    program: Program | str | None = None,
    force: bool = False,
    tell: Advance = silent,
) -> Repeat:
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
    entries = tuple(one.record.entry for one in before.entries)
    select = ProgramSelection(record.layers, record.asked, entries, positions, record.taps)
    strict = any(w.startswith(STRICTLY) for w in record.warnings)
    command = f"precaudit trace --repeat {before.folder}"
    target = target_of(asked_device(record.device))
    how = ProgramTraceOptions(record.program, force, command, target, strict)
    again = trace_program(found, output, select, how, tell)
    return compare_bits(before, again)
