"""What becomes of calls that a watched script made: runs, recorded at once and compared when the script has ended."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from precaudit.errors import PrecauditError, UserError
from precaudit.numbers.bytes_text import bytes_text
from precaudit.recording.watching.calls import Function, Kept
from precaudit.recording.watching.records import SeenRun, WatchOrder
from precaudit.writing import temporary

LARGE = 256 << 20  # bytes a call, from which on it is said what one layer takes


def say(what: str) -> None:
    """Say what is done on stderr, beside what the script says."""
    print(f"precaudit: {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Recorded:
    """Calls that were recorded: which they are, their run, their program, and whether they were compared."""

    calls: str
    run: Any
    program: Any
    compared: bool = False
    diagnosis: tuple[str, ...] = ()


class Recorder:
    """Makes a run of every group of calls that it takes; of a run that is compared again (``order.again``), none.

    ``notes``: what could not be recorded, or compared, and why; ``tell`` takes what is done.
    """

    def __init__(self, order: WatchOrder, tell: Callable[[str], None] = say) -> None:
        self.order, self.tell, self.notes = order, tell, list[str]()
        self.process, self.lock = os.getpid(), threading.Lock()
        self.made: list[Recorded] = []
        self.before: Any = None
        if order.again is not None:
            from precaudit.recording.runs.programs import open_program_run

            self.before = open_program_run(order.again)
            self.notes += other_versions(self.before.record.versions)

    @property
    def runs(self) -> tuple[SeenRun, ...]:
        """The runs that were made."""
        return tuple(
            SeenRun(
                folder=str(x.run.folder),
                calls=x.calls,
                points=len(x.run.record.points),
                compared=x.compared,
                diagnosis=x.diagnosis,
            )
            for x in self.made
        )

    def take(self, of: Function, group: Sequence[Kept]) -> None:
        """Record calls of a function; the script goes on whatever breaks here."""
        if os.getpid() != self.process:  # a process that the script forked
            return
        first, last = group[0].number, group[-1].number
        calls = f"{of.name}, call {first}" if len(group) == 1 else f"{of.name}, calls {first} to {last}"
        with self.lock:
            try:
                found = self._record(of, group, calls) if self.before is None else self._again(of, group, calls)
            except (PrecauditError, NotImplementedError) as error:
                self.notes.append(f"{calls}: {error}")
            except Exception as error:
                self.notes.append(f"{calls}: recording broke off: {type(error).__name__}: {error}")
            else:
                self.made += found

    def compare(self) -> None:
        """Compare every run that was made with FP64, or do else what is asked of it; Ctrl-C leaves it."""
        for i, x in enumerate(self.made if self.order.compare else ()):
            if x.compared:
                continue
            self.tell(f"comparing {x.calls} with FP64 (Ctrl-C skips it)")
            try:
                self._compare(x)
                self.made[i] = replace(x, compared=True)
                self.made[i] = replace(x, compared=True, diagnosis=self._diagnosis(x))
            except PrecauditError as error:
                self.notes.append(f"{x.calls}: {error}")
            except KeyboardInterrupt:
                what, verb = ("diagnosed", "diagnose") if self.made[i].compared else ("compared", "compare")
                self.notes.append(f"{x.calls}: interrupted, not {what}: precaudit {verb} {x.run.folder} --rerun")
                return

    def _compare(self, x: Recorded) -> None:
        """Compare a run, or write its FP64 values, or hold them against another's."""
        from precaudit.diagnosis.sameness.compared import Named
        from precaudit.diagnosis.sameness.dumped import held_against_dump, write_values
        from precaudit.recording.dumps.reading import read_dump
        from precaudit.workflows.verbs import compare

        named, case = Named(x.program, x.program.entry, x.run.folder.name), x.run.record.cases[0]
        if self.order.values:
            write_values(x.run, x.program, case, Path(self.order.values))
        elif self.order.beside:
            theirs = Path(self.order.beside)
            found = held_against_dump(named, x.run, case, read_dump(theirs), theirs.stem)
            Path(self.order.answer).write_bytes(msgspec.json.encode(found))
        else:
            compare(x.run, x.program, accum=self.order.accum, model=self.order.model)

    def _diagnosis(self, x: Recorded) -> tuple[str, ...]:
        """Return what is to be said of a run that fails, while its program is here."""
        from precaudit.judging.gate import gate
        from precaudit.recording.runs.compared_programs import program_errors
        from precaudit.reports.program_diagnosis import program_diagnosis_report
        from precaudit.workflows.verbs import diagnose

        if not self.order.diagnose or gate(x.run.folder).exit_code != 1:
            return ()
        self.tell(f"diagnosing {x.calls} (Ctrl-C skips it)")
        return tuple(program_diagnosis_report(diagnose(x.run, x.program), program_errors(x.run)).lines)

    def _record(self, of: Function, group: Sequence[Kept], calls: str) -> list[Recorded]:
        from precaudit.recording.runs.kinds import write_manifest
        from precaudit.recording.runs.programs import open_program_run
        from precaudit.recording.watching.programs import outputs_apart, program_of_calls
        from precaudit.workflows.verbs import trace

        picked, order = self.order.picked, self.order
        program = program_of_calls(group, of.name)
        filters = {n: x for n in ("layers", "points", "positions") if (x := getattr(picked, n)) is not None}
        self._check_size(program, filters, calls)
        run = trace(program, self._folder(), force=order.force, command=order.said, **filters)
        command = order.command
        if command is not None:
            command = msgspec.structs.replace(command, first=group[0].number, last=group[-1].number)
        warnings = [*run.record.warnings]
        if apart := outputs_apart(run, group):
            warnings.append(apart)
            self.notes.append(f"{calls}: {apart}")
        write_manifest(run.folder, msgspec.structs.replace(run.record, watched=command, warnings=tuple(warnings)))
        return [Recorded(calls, open_program_run(run.folder), program)]

    def _again(self, of: Function, group: Sequence[Kept], calls: str) -> list[Recorded]:
        """Return the run that is compared again with the program of its calls; nothing of other calls."""
        from precaudit.recording.watching.programs import check_same_calls, program_of_calls

        command = self.before.record.watched
        if (group[0].number, group[-1].number) != (command.first, command.last):
            return []
        check_same_calls(self.before, group)
        return [Recorded(calls, self.before, program_of_calls(group, of.name))]

    def _check_size(self, program: Any, filters: dict[str, str], calls: str) -> None:
        """Say how much will be recorded; raises UserError where that is more than was allowed."""
        from precaudit.recording.watching.programs import size_of_calls

        size, steps = size_of_calls(program, **filters)
        less = ""
        if size / steps > LARGE and "layers" not in filters:
            with suppress(UserError):  # it scans over nothing: its layers are points of their own
                one, _ = size_of_calls(program, **{**filters, "layers": "-1"})
                less = f"; --layers -1: {bytes_text(one / steps)}"
        self.tell(f"recording {calls}: {bytes_text(size / steps)} a call{less}")
        there = sum(x.run.record.bytes for x in self.made)
        if self.order.most is not None and there + size > self.order.most:
            raise UserError(
                f"not recorded: it takes {bytes_text(size)}, and --most {bytes_text(self.order.most)} leaves "
                f"{bytes_text(max(0, self.order.most - there))}; fewer --calls, --layers or --points take less"
            )

    def _folder(self) -> Path:
        """Return where the next run goes: the folder that was named, or one in it for each where they are several."""
        from precaudit.recording.runs.programs import open_program_run

        whole = Path(self.order.output or "")
        if len(self.made) == 1:
            (one,) = self.made
            aside = temporary(whole)
            whole.rename(aside)
            whole.mkdir()
            aside.rename(whole / "0")
            self.made = [replace(one, run=open_program_run(whole / "0"))]
        return whole / str(len(self.made)) if self.made else whole


def other_versions(recorded: dict[str, str]) -> list[str]:
    """Return what differs from the versions that a run was recorded with."""
    from precaudit.recording.tracing.conditions import number_versions

    now = number_versions()
    return [f"{name} is {now.get(name)}, the run has {v}" for name, v in recorded.items() if now.get(name) != v]
