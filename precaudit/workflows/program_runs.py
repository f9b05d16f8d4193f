"""``trace``, ``compare`` and ``diagnose`` of a Program and its run: what their keywords ask for."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from precaudit.errors import UserError
from precaudit.numbers.bytes_text import bytes_of
from precaudit.numbers.executors import Executor, executor
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.written import Comparison
from precaudit.workflows.keywords import (
    FILTERS,
    Keywords,
    accumulations,
    check_keywords,
    progress_of,
    take_keywords,
)

TRACED = ("policy", "settings", "taps", "strict", "force", "resume", "reference", "command", "progress")
WHO = ("jobs", "scheduler", "memory")  # computes
OWN = ("device", "rename", "sketch")  # the device: one that is predicted


def trace_own(subject: Program | str, output: Path | str, keywords: Keywords) -> Opened:
    """Run and record a Program, or the one of a name, as the keywords of ``trace`` say."""
    from precaudit.interpreters.jaxpr.sketches import check_projections
    from precaudit.recording.programs.loading import load_program, rename_points
    from precaudit.recording.programs.planning import ProgramSelection, longest_scan
    from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
    from precaudit.recording.tracing.predicting import program_target
    from precaudit.schema.selection import names_in, parse_layers

    def names_or_none(given: Any, what: str) -> tuple[str, ...] | None:
        return names_in(given, what) if isinstance(given, str) else None if given is None else tuple(given)

    check_keywords("trace of a Program", keywords, (*FILTERS, *TRACED, *OWN))
    device, rename, sketch = (keywords.pop(name, None) for name in OWN)
    target = None if device is None else program_target(device, keywords.get("strict", False))
    if device is not None and target is None:
        raise UserError(f"a program says itself what it runs on; leave out device={device!r}")
    if sketch:
        check_projections(sketch)
    if isinstance(subject, str):
        keywords.setdefault("reference", subject)
        subject = load_program(subject)
    layers, taps = keywords.pop("layers", None), keywords.pop("taps", "both")
    asked, cases = (
        names_or_none(keywords.pop(name, None), what) for name, what in (("points", "point"), ("prompt", "case"))
    )
    subject = subject if rename is None else rename_points(subject, Path(rename))
    subject = subject if cases is None else subject.some(cases)
    at = names_or_none(keywords.pop("positions", None), "position")
    phases = names_or_none(keywords.pop("phases", None), "entry point")
    policy, settings = keywords.pop("policy", None), keywords.pop("settings", None)
    subject = subject if policy is None and settings is None else subject.announcing(policy, settings)
    if isinstance(layers, str | int):
        layers = parse_layers(str(layers), longest_scan(subject, taps))
    asked = None if asked is None or "all" in asked else asked
    select = ProgramSelection(layers, asked, phases, None if at is None else ",".join(map(str, at)), taps)
    with progress_of(keywords.pop("progress", None)) as progress:
        options = ProgramTraceOptions(target=target, sketch=sketch, **keywords)
        return trace_program(subject, output, select, options, progress.advance)


def compare_own(opened: Opened, against: Any, keywords: Keywords) -> Comparison[Opened]:
    """Compare a Program's run with FP64, as the keywords of ``compare`` say."""
    from precaudit.judging.looks import look_at, selected
    from precaudit.references.alignment.textbook import beside_model
    from precaudit.references.comparison.compare import DEFAULT_ACCUM
    from precaudit.references.comparison.programs import compare_program
    from precaudit.references.textbook.pieces import Execution

    names = ("program", "reference", "model", "accum", "partial", *FILTERS, *WHO, "progress")
    check_keywords("compare of a Program's run", keywords, names)
    program, accum = keywords.get("program"), keywords.get("accum")
    if against is not None and program is not None:
        raise UserError("precaudit.compare: program was given twice")
    accums, named = DEFAULT_ACCUM if accum is None else accumulations(accum), against if program is None else program
    with progress_of(keywords.get("progress")) as telling, _executor(keywords) as by:
        look = look_at(opened, **take_keywords(keywords, FILTERS))
        reference, model = keywords.get("reference"), keywords.get("model")
        its, reference = beside_model(opened, named, reference, model, telling.advance)
        program, execution = its if by.here else named, Execution(by, telling.advance)
        holds = None if look is None else look.holds
        found = compare_program(opened, program, reference, execution, accums, holds)
        return found if look is None else selected(found, look)


def diagnose_own(opened: Opened, keywords: Keywords) -> Any:
    """Find the causes of the errors of a Program's run, as the keywords of ``diagnose`` say."""
    from precaudit.diagnosis.programs import diagnose_program
    from precaudit.judging.looks import look_at

    names = ("select", "program", "objective", "model", "partial", *FILTERS, "progress")
    check_keywords("diagnose of a Program's run", keywords, names)
    select, program = keywords.get("select"), keywords.get("program")
    if select is not None and program is not None:
        raise UserError("precaudit.diagnose: program was given twice")
    with progress_of(keywords.get("progress")) as telling:
        look = look_at(opened, **take_keywords(keywords, FILTERS))
        its, objective = select if program is None else program, keywords.get("objective")
        return diagnose_program(opened, its, telling.advance, objective, look, keywords.get("model"))


def compare_pair(opened: Any, other: Any, keywords: Keywords) -> Any:
    """Compare two runs of which one is a Program's or imported, as the keywords of ``compare`` say."""
    from precaudit.judging.looks import look_at, selected
    from precaudit.references.comparison.between import compare_runs

    check_keywords("compare of these two runs", keywords, (*FILTERS, *WHO, "progress"))
    look = look_at(opened, **take_keywords(keywords, FILTERS))
    with progress_of(keywords.get("progress")) as telling, _executor(keywords) as by:
        found = compare_runs(opened.folder, other.folder, telling.advance, by=by)
    return found if look is None else selected(found, look)


def _executor(keywords: Keywords) -> AbstractContextManager[Executor]:
    """Return what computes pieces, as keywords say: a context."""
    memory = bytes_of(keywords.get("memory"), "memory=")
    return executor(keywords.get("jobs") or 1, keywords.get("scheduler"), memory)


def compare_sketched(run: Any, against: Any, keywords: Keywords) -> Any:
    """Compare two runs, opened or their folders, that keep no tensors; None where the first keeps them."""
    from precaudit.recording.runs.sketched import is_sketched

    folders = [getattr(x, "folder", x) for x in (run, against)]
    if not all(isinstance(x, Path | str) for x in folders) or not is_sketched(folders[0]):
        return None
    from precaudit.references.comparison.sketches import compare_sketches

    check_keywords("compare of two runs of sketches", keywords, ())
    return compare_sketches(*map(Path, folders))
