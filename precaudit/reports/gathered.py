"""All that is written beside a run, of a model or of a program, for a report that shows all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from pathlib import Path
from typing import Any, TypeVar

from precaudit.diagnosis.evidence.records import Finding, LineRemedy, Remedy, Shares
from precaudit.judging.gate import Criteria, gate, gate_selected
from precaudit.judging.judgement import Judgement
from precaudit.judging.looks import Look, look_by, selected
from precaudit.judging.recalled import recall_any
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import Opened, ProgramRun
from precaudit.recording.runs.unique import UniqueHashes
from precaudit.recording.runs.written import Comparison
from precaudit.reports.headline import AMONG, of_status
from precaudit.schema.records.base import Record
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import read_lines
from precaudit.schema.records.runs import RunRecord
from precaudit.schema.selection import Filters

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Recalled:
    """What compare wrote of a run, not judged yet."""

    folder: Path
    compared: Comparison[Any]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> Sequence[ErrorRecord]:
        """The error records."""
        return self.compared.errors

    @property
    def program(self) -> Opened | None:
        """The run where it is of a program."""
        return self.compared.run if isinstance(self.compared.run, Opened) else None

    @property
    def record(self) -> RunRecord | ProgramRun:
        """The manifest of the run."""
        made: RunRecord | ProgramRun = self.compared.run.record
        return made


@dataclass(frozen=True)
class Gathered(Recalled):
    """A compared run and what else is known of it; ``findings``, ``shares``, ``remedies``: None where not diagnosed.

    ``among``: what of it is looked at, in words, where that is not all.
    """

    judgement: Judgement = field(kw_only=True)
    findings: tuple[Finding, ...] | None = None
    shares: tuple[Shares, ...] | None = None
    remedies: tuple[Remedy | LineRemedy, ...] | None = None
    among: str = ""

    def suspects(self) -> UniqueHashes:
        """Return (kind, place) of every failure that something before it accounts for."""
        found = UniqueHashes()
        for v in of_status(self.judgement, "input suspect"):
            found.add((v.kind, v.place))
        return found


def recall_run(folder: Path) -> Recalled:
    """Read what compare wrote of a run; raises UserError for what was not compared, or was altered."""
    found = recall_any(folder)
    return Recalled(folder, found, _sources(found.run))


@singledispatch
def _sources(_run: Any) -> dict[str, str]:
    """Return the line that made each point of a run; a model's are not the user's."""
    return {}


@_sources.register
def _(run: Opened) -> dict[str, str]:
    return {p.name: p.source for one in run.entries for p in (*one.record.points, *one.record.outputs) if p.source}


def gather_run(folder: Path, filters: Filters | None = None) -> Gathered:
    """Read a compared run and what diagnose wrote of it, or what filters select of both.

    Raises UserError for what was not compared, or was altered, and for filters that name what the run lacks.
    """
    found = gather(recall_run(folder))
    look = None if filters is None else look_by(found.compared.run, filters)
    if filters is None or look is None:
        return found
    return _selected(found, look, gate_selected(folder, Criteria(filters=filters)))


def _selected(found: Gathered, look: Look, judged: Judgement) -> Gathered:
    """Return what a look at a run holds; shares and what changes help are for the whole, and are omitted."""
    findings = None if found.findings is None else tuple(f for f in found.findings if _is_held(f, look))
    compared = selected(found.compared, look)
    return replace(
        found, compared=compared, judgement=judged, findings=findings, shares=None, remedies=None, among=AMONG
    )


def _is_held(f: Finding, look: Look) -> bool:
    """Whether a finding shows in a layer, phase and case that is looked at, and at its point."""
    return (
        (look.layers is None or not f.layers or bool(set(f.layers) & set(look.layers)))
        and (look.points is None or bool({f.point, f.point.partition("#")[0]} & set(look.points)))
        and (look.phases is None or not f.phases or bool(set(f.phases) & set(look.phases)))
        and (look.cases is None or not f.prompts or bool(set(f.prompts) & set(look.cases)))
    )


def gather(run: Recalled) -> Gathered:
    """Judge what compare wrote of a run, and read what diagnose wrote; raises UserError as ``gather_run``.

    Findings that the verdict contradicts are of another comparison or of a part, and are left out: errors that are off
    where none is, or nothing where something fails.
    """
    said = gate(run.compared)
    changes = _of_run(run.folder, "remedies", Remedy)  # changes of a policy's keys, or of lines
    return Gathered(
        run.folder,
        run.compared,
        run.sources,
        judgement=said,
        findings=findings_of(run.folder, said),
        shares=_of_run(run.folder, "shares", Shares),
        remedies=_of_run(run.folder, "lines", LineRemedy) if changes is None else changes,
    )


def findings_of(folder: Path, said: Judgement) -> tuple[Finding, ...] | None:
    """Return what diagnose wrote beside a run, None where nothing, or where the verdict contradicts it."""
    found, fails = _read_lines(folder, "findings.jsonl", Finding), said.exit_code == 1
    if found is None or (fails and not found) or (not fails and any(f.rel_l2 is not None for f in found)):
        return None
    return found  # one without an error is of the FP64 shadow, which no verdict sees


def _read_lines(folder: Path, name: str, kind: type[R]) -> tuple[R, ...] | None:
    return tuple(read_lines(folder / name, kind)) if (folder / name).is_file() else None


def _of_run(folder: Path, name: str, kind: type[R]) -> tuple[R, ...] | None:
    """Return the lines of a file that are of this very run, as each says."""
    found, run = _read_lines(folder, f"{name}.jsonl", kind), file_hash(manifest_of(folder))
    return None if found is None else tuple(x for x in found if getattr(x, "run", None) == run)
