"""``trace``, ``compare``, ``diagnose``: of models that precaudit runs, and of programs of one's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from precaudit.errors import UserError
from precaudit.mirrors import takes_urls
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.opening import AnyRun, holds_run, open_any
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.served import ServedModel
from precaudit.recording.runs.programs import Opened, ProgramErrors
from precaudit.recording.runs.reader import Run
from precaudit.schema.selection import Texts
from precaudit.workflows.dumped_model import opened_dump
from precaudit.workflows.keywords import (
    FILTERS,
    Keywords,
    accumulations,
    check_keywords,
    given_keywords,
    option_names,
    options_of,
    progress_of,
    prompts_of,
    selection,
    take_keywords,
)
from precaudit.workflows.model_runs import compare_model, diagnose_model
from precaudit.workflows.signatures import (
    Comparing,
    DiagnoseOptions,
    LookingAtProgram,
    OfModel,
    OfProgram,
    Prompts,
    Telling,
)

if TYPE_CHECKING:
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.interpreters.jaxpr.tag import Which
    from precaudit.models.jax_decoder import Parts
    from precaudit.recording.runs.written import Comparison
    from precaudit.recording.tracing.subject import Subject
    from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
    from precaudit.references.comparison.between import Between
    from precaudit.references.comparison.compare import CompareOptions as CompareOptions
    from precaudit.references.formula import OwnReference
    from precaudit.references.names_map import Names
    from precaudit.schema.policies import Policy
    from precaudit.schema.selection import Selection

LOOKS = ("layers", "points", "phases", "prompt")  # filters of what is shown of a Program's run
LOADED = ("policy", "settings", "device", "parts", "allow", "mesh")  # what ``load`` takes beside a name


@overload
def trace(  # type: ignore[overload-overlap]  # a model is a Program whose run is a model's
    subject: "Subject | str",
    output: Path | str,
    prompts: "Prompts" = None,
    select: "Selection | None" = None,
    options: "TraceOptions | None" = None,
    progress: Telling = None,
    **how: Unpack[OfModel],
) -> "Run": ...
@overload
def trace(subject: Program, output: Path | str, *, progress: Telling = None, **how: Unpack[OfProgram]) -> Opened: ...
@takes_urls
def trace(
    subject: Any,
    output: Path | str,
    prompts: "Prompts" = None,
    select: "Selection | None" = None,
    options: "TraceOptions | None" = None,
    progress: Telling = None,
    *,
    layers: Texts | None = None,
    points: Texts | None = None,
    phases: Texts | None = None,
    positions: Texts | None = None,
    prompt: Texts | None = None,
    decode_steps: int | None = None,
    batch: int | None = None,
    pad: str | None = None,
    tokens_from: Path | str | None = None,
    forced: Mapping[str, Sequence[int]] | None = None,
    force: bool | None = None,
    resume: bool | None = None,
    command: str | None = None,
    policy: "Policy | str | None" = None,
    settings: Mapping[str, str] | None = None,
    device: str | None = None,
    mesh: str | None = None,
    parts: "Parts | None" = None,
    allow: Sequence[str] | None = None,
    taps: "Which | None" = None,
    strict: bool | None = None,
    reference: str | None = None,
    **unknown: object,
) -> Any:
    """Run and record ``subject`` into the folder ``output``; return the run opened.

    ``subject``: a Program, as ``load`` returns one, too; or a name or path that
    ``load`` takes. What is None is as it is by default.

    Of all: ``layers="0,15:18"`` (of a Program the steps of its scans), ``points="q,k"``, ``phases`` (of a Program its
    entry points), ``positions`` (of a Program calls of one, one after another), ``prompt`` (ids of prompts, or cases),
    ``policy`` and ``settings`` (of a Program what it announces), ``force``; ``progress=True`` shows a bar. Of a model:
    ``prompts``, a list of texts, {id: text} or the path of a JSONL file (None: the shipped ones), or
    ``select=Selection(…)`` for all filters; ``decode_steps``, ``batch``, ``pad``, ``tokens_from``, ``resume``, or
    ``options=``; of a name also what ``load`` takes. Of a Program: ``strict`` and ``taps="both"`` (its
    ``checkpoint_name`` taps, ``"own"``, and ``"automatic"`` ones).

    Raises UserError before anything is written where something asked for is not possible.

    >>> run = precaudit.trace("tiny", "runs/a", prompts=["Hello"], layers="0", force=True)  # doctest: +SKIP
    """
    keywords = given_keywords("trace", locals(), "subject", "output")
    if not isinstance(subject, str | Program):
        raise UserError(f"trace: a Program, a model's name or its path, and not {type(subject).__name__}")
    if isinstance(subject, str | ServedModel):
        return _trace_model(subject, output, keywords)
    return _trace_program(subject, output, keywords)


def _trace_model(subject: Any, output: Path | str, keywords: Keywords) -> Any:
    from precaudit.recording.tracing.subject import load
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.recording.tracing.trace import trace as recorded

    names = ("prompts", "select", "options", "progress")
    check_keywords("trace", keywords, (*names, *FILTERS, *option_names(TraceOptions), *LOADED))
    loading = take_keywords(keywords, LOADED)
    if loading and not isinstance(subject, str):
        raise UserError(f"{', '.join(loading)} belong to precaudit.load, which made this subject")
    prompts = prompts_of(keywords.pop("prompts", None))
    select = selection(keywords.pop("select", None), keywords)
    options = options_of(TraceOptions, keywords.pop("options", None), keywords, TraceOptions())
    with progress_of(keywords.pop("progress", None)) as progress:
        subject = load(subject, **loading) if isinstance(subject, str) else subject
        return recorded(subject, output, prompts, select, options, progress)


def _trace_program(subject: Program, output: Path | str, keywords: Keywords) -> Any:
    from precaudit.recording.programs.planning import ProgramSelection, longest_scan
    from precaudit.recording.programs.tracing import ProgramTraceOptions
    from precaudit.recording.programs.tracing import trace_program as traced
    from precaudit.schema.selection import names_in, parse_layers

    def names_or_none(given: Any, what: str) -> tuple[str, ...] | None:
        return names_in(given, what) if isinstance(given, str) else None if given is None else tuple(given)

    names = ("policy", "settings", "taps", "strict", "force", "resume", "reference", "command", "progress")
    check_keywords("trace of a Program", keywords, (*FILTERS, *names))
    layers, taps = keywords.pop("layers", None), keywords.pop("taps", "both")
    asked, cases = (
        names_or_none(keywords.pop(name, None), what) for name, what in (("points", "point"), ("prompt", "case"))
    )
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
        return traced(subject, output, select, ProgramTraceOptions(**keywords), progress.advance)


@overload
def compare(run: Imported, against: Any, *, progress: Telling = None) -> "Between": ...
@overload
def compare(
    run: Opened,
    against: "Program | Run | Opened | Path | str | None" = None,
    *,
    reference: "OwnReference | Names | None" = None,
    **how: Unpack[LookingAtProgram],
) -> ProgramErrors: ...
@overload
def compare(
    run: "Run | Imported | Path | str",
    against: Any = None,
    select: "Selection | None" = None,
    options: "CompareOptions | None" = None,
    **how: Unpack[Comparing],
) -> "Comparison": ...
@takes_urls
def compare(
    run: Any,
    against: Any = None,
    select: "Selection | None" = None,
    options: "CompareOptions | None" = None,
    *,
    subject: "Subject | None" = None,
    layers: Texts | None = None,
    points: Texts | None = None,
    phases: Texts | None = None,
    positions: Texts | None = None,
    prompt: Texts | None = None,
    accum: Texts | None = None,
    formula: bool | None = None,
    model: str | None = None,
    policy: "Policy | str | None" = None,
    partial: bool | None = None,
    fresh: bool | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    cache: Path | None = None,
    program: "Program | str | None" = None,
    reference: "OwnReference | Names | None" = None,
    progress: Telling = None,
    **unknown: object,
) -> Any:
    """Compute a run's errors and write them beside it.

    ``against``: another run; of a Program's run its program, too, which ``program=`` gives as well (None: the one that
    it names). Of a model's run: filters ``layers``, ``points``, ``phases``, ``prompt`` or ``select=``;
    ``accum="float16"`` or a list (formats to emulate sums in, ``()`` for none), ``formula=True``, ``model``,
    ``partial``, ``fresh``, ``cache``, ``jobs`` (processes), ``scheduler`` (a cluster's) or ``options=``; ``subject``.
    Of a Program's run: ``reference`` or ``model``, ``accum``; ``layers``, ``points``, ``phases`` (entry points)
    ``prompt`` (cases): a part. ``progress=True``: a bar. Of an imported dump: another run, or ``model``, whose FP64 it
    is compared with, and ``policy``, what it computes in.
    >>> found = precaudit.compare("runs/a", accum=(), formula=True)  # doctest: +SKIP
    """
    keywords = given_keywords("compare", locals(), "run", "against")
    opened = _open(run, keywords)
    other = open_any(against) if holds_run(against) else against
    if isinstance(other, Imported | Opened) or (holds_run(other) and not isinstance(opened, Run)):
        from precaudit.references.comparison.between import compare_runs

        check_keywords("compare of these two runs", keywords, ("progress",))
        with progress_of(progress) as telling:
            return compare_runs(opened.folder, other.folder, telling.advance)
    if isinstance(opened, Imported):
        return compare_model(opened_dump(opened.folder, keywords), None, keywords)
    if isinstance(opened, Run):
        return compare_model(opened, other, keywords)
    from precaudit.judging.looks import look_at
    from precaudit.references.alignment.textbook import beside_model
    from precaudit.references.comparison.compare import DEFAULT_ACCUM
    from precaudit.references.comparison.programs import compare_program as compared

    check_keywords(
        "compare of a Program's run", keywords, ("program", "reference", "model", "accum", *LOOKS, "progress")
    )
    if against is not None and program is not None:
        raise UserError("precaudit.compare: program was given twice")
    with progress_of(progress) as telling:
        look = look_at(opened, layers, points, phases, prompt)
        its = against if program is None else program
        its, reference = beside_model(opened, its, reference, model, telling.advance)
        accums = DEFAULT_ACCUM if accum is None else accumulations(accum)
        found = compared(opened, its, reference, telling.advance, accums)
        return found if look is None else ProgramErrors(look.of(found), opened)


def _open(run: Any, keywords: Keywords) -> AnyRun:
    """Return a run of any kind opened; options that were given twice are told before it is looked for."""
    from precaudit.references.comparison.compare import CompareOptions

    options = options_of(CompareOptions, keywords.get("options"), dict(keywords), CompareOptions())
    return open_any(run, options.partial)


@overload
def diagnose(
    run: Opened,
    its: "Program | str | None" = None,
    /,
    *,
    objective: str | None = None,
    **how: Unpack[LookingAtProgram],
) -> "Diagnosed": ...
@overload
def diagnose(
    run: "Run | Path | str",
    select: "Selection | Program | None" = None,
    options: "CompareOptions | None" = None,
    **how: Unpack[DiagnoseOptions],
) -> "Diagnosis": ...
@takes_urls
def diagnose(
    run: Any,
    select: Any = None,
    options: "CompareOptions | None" = None,
    *,
    subject: "Subject | None" = None,
    lift: Any = None,
    objective: str | None = None,
    layers: Texts | None = None,
    points: Texts | None = None,
    phases: Texts | None = None,
    positions: Texts | None = None,
    prompt: Texts | None = None,
    accum: Texts | None = None,
    formula: bool | None = None,
    model: str | None = None,
    partial: bool | None = None,
    fresh: bool | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    cache: Path | None = None,
    program: "Program | str | None" = None,
    progress: Telling = None,
    **unknown: object,
) -> Any:
    """Find the causes of a run's errors.

    Of a model's run: what ``compare`` takes but ``against``, and ``lift``, ``objective``. Of a Program's run:
    ``program``, second too, ``objective``, ``model``, and ``layers``, ``points``, ``phases``, ``prompt``.
    ``progress=True`` shows a bar.

    >>> precaudit.diagnose("runs/a", layers="2", points="scores")  # doctest: +SKIP
    """
    keywords = given_keywords("diagnose", locals(), "run")
    opened = _open(run, keywords)
    if not isinstance(opened, Opened):
        return diagnose_model(opened if isinstance(opened, Run) else opened.folder, keywords)
    from precaudit.diagnosis.programs import diagnose_program as named
    from precaudit.judging.looks import look_at

    check_keywords(
        "diagnose of a Program's run", keywords, ("select", "program", "objective", "model", *LOOKS, "progress")
    )
    if select is not None and program is not None:
        raise UserError("precaudit.diagnose: program was given twice")
    with progress_of(progress) as telling:
        look = look_at(opened, layers, points, phases, prompt)
        return named(opened, select if program is None else program, telling.advance, objective, look, model)
