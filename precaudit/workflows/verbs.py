"""``trace``, ``compare``, ``diagnose``: of models that precaudit runs, and of programs of one's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from precaudit.errors import UserError
from precaudit.mirrors import takes_urls
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.opening import AnyRun, holds_run, open_any
from precaudit.recording.programs.loading import is_reference
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.served import ServedModel
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.schema.selection import Texts
from precaudit.workflows.dumped_model import opened_dump
from precaudit.workflows.keywords import given_keywords, options_of
from precaudit.workflows.model_runs import compare_model, diagnose_model, trace_model
from precaudit.workflows.program_runs import compare_own, compare_pair, compare_sketched, diagnose_own, trace_own
from precaudit.workflows.signatures import (
    Comparing,
    ComparingProgram,
    DiagnoseOptions,
    LookingAtProgram,
    OfModel,
    OfProgram,
    OfSketches,
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
    from precaudit.references.comparison.compare import CompareOptions as CompareOptions
    from precaudit.references.formula import OwnReference
    from precaudit.references.names_map import Names
    from precaudit.schema.policies import Policy
    from precaudit.schema.selection import Selection
    from precaudit.workflows.keywords import Keywords


@overload
def trace(  # type: ignore[overload-overlap]
    subject: "Subject | str",
    output: Path | str,
    prompts: "Prompts" = None,
    select: "Selection | None" = None,
    *,
    progress: Telling = None,
    **how: Unpack[OfSketches],
) -> list[Opened]: ...
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
    sketch: int | None = None,
    taps: "Which | None" = None,
    strict: bool | None = None,
    rename: Path | str | None = None,
    reference: str | None = None,
    **unknown: object,
) -> Any:
    """Run and record ``subject`` into the folder ``output``; return the run opened.

    ``subject``: a Program, as ``load`` returns one, too; its name, ``FILE.py:NAME``; or a name or path that ``load``
    takes. What is None is as it is by default.

    For all: ``layers="0,15:18"`` (for a Program the steps of its scans), ``points="q,k"``, ``phases`` (for a Program
    its entry points), ``positions`` (for a Program calls of one, one after another), ``prompt`` (ids of prompts, or
    cases), ``policy`` and ``settings`` (for a Program what it announces), ``force``; ``progress=True`` shows a bar.
    ``sketch=128`` keeps so many projections of each tensor and no tensors, ``sketch=0`` sums alone: for a model this
    returns a list of runs, one for each length of prompts.

    For a model: ``prompts``, a list of texts, {id: text} or the path of a JSONL file (None: the shipped ones), or
    ``select=Selection(…)`` for all filters; ``decode_steps``, ``batch``, ``pad``, ``tokens_from``, ``resume``, or
    ``options=``; for a name also what ``load`` takes. For a Program: ``strict``, ``taps="both"`` (its
    ``checkpoint_name`` taps, ``"own"``, and ``"automatic"`` ones), ``rename`` (a TOML file of other names for its
    points), ``resume``, and ``device="tpu-predicted:v5e"``, a TPU that is not here.

    Raises UserError before anything is written where something asked for is not possible.

    >>> run = precaudit.trace("tiny", "runs/a", prompts=["Hello"], layers="0", force=True)  # doctest: +SKIP
    """
    keywords = given_keywords("trace", locals(), "subject", "output")
    if not isinstance(subject, str | Program):
        raise UserError(f"trace: a Program, a model's name or its path, and not {type(subject).__name__}")
    own = is_reference(subject) if isinstance(subject, str) else not isinstance(subject, ServedModel)
    return (trace_own if own else trace_model)(subject, output, keywords)


@overload
def compare(run: Imported, against: Any, *, progress: Telling = None) -> "Comparison[AnyRun]": ...
@overload
def compare(
    run: Opened,
    against: "Program | Run | Opened | Path | str | None" = None,
    *,
    reference: "OwnReference | Names | None" = None,
    **how: Unpack[ComparingProgram],
) -> "Comparison[Opened]": ...
@overload
def compare(
    run: "Run | Imported | Path | str",
    against: Any = None,
    select: "Selection | None" = None,
    options: "CompareOptions | None" = None,
    **how: Unpack[Comparing],
) -> "Comparison[Run]": ...
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
    memory: int | str | None = None,
    cache: Path | None = None,
    program: "Program | str | None" = None,
    reference: "OwnReference | Names | None" = None,
    progress: Telling = None,
    **unknown: object,
) -> Any:
    """Compute a run's errors and write them beside it.

    ``against``: another run; for a Program's run its program, too, which ``program=`` gives as well (None: the one that
    it names). Filters ``layers``, ``points``, ``phases`` (entry points), ``positions`` (calls) and ``prompt`` (cases)
    choose a part. For a model's run: ``select=`` in their place; ``accum="float16"`` or a list (formats to emulate
    sums in, ``()`` for none), ``formula=True``, ``model``, ``partial``, ``fresh``, ``cache``, ``jobs`` (processes),
    ``scheduler`` (a cluster's), ``memory="4GB"`` (the most of each process) or ``options=``; ``subject``. For a
    Program's run: ``reference`` or ``model``, ``accum``; ``jobs``, ``scheduler`` and ``memory``, as for two runs. For
    an imported dump: another run, or ``model``, whose FP64 it is compared with, and ``policy``, what it computes in.
    Two runs of sketches, given as their folders.
    ``progress=True``: a bar.

    >>> found = precaudit.compare("runs/a", accum=(), formula=True)  # doctest: +SKIP
    """
    keywords = given_keywords("compare", locals(), "run", "against")
    if against is not None and (sketched := compare_sketched(run, against, keywords)) is not None:
        return sketched
    opened = _open(run, keywords)
    other = open_any(against) if holds_run(against) else against
    if isinstance(other, Imported | Opened) or (holds_run(other) and not isinstance(opened, Run)):
        return compare_pair(opened, other, keywords)
    if isinstance(opened, Imported):
        return compare_model(opened_dump(opened.folder, keywords), None, keywords)
    if isinstance(opened, Run):
        return compare_model(opened, other, keywords)
    return compare_own(opened, against, keywords)


def _open(run: Any, keywords: "Keywords") -> AnyRun:
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
    memory: int | str | None = None,
    cache: Path | None = None,
    program: "Program | str | None" = None,
    progress: Telling = None,
    **unknown: object,
) -> Any:
    """Find the causes of a run's errors.

    For a model's run: what ``compare`` takes but ``against``, and ``lift``, ``objective``. For a Program's run:
    ``program``, second too, ``objective``, ``model``, and ``layers``, ``points``, ``phases``, ``positions``,
    ``prompt``. ``progress=True`` shows a bar.

    >>> precaudit.diagnose("runs/a", layers="2", points="scores")  # doctest: +SKIP
    """
    keywords = given_keywords("diagnose", locals(), "run")
    opened = _open(run, keywords)
    if not isinstance(opened, Opened):
        return diagnose_model(opened if isinstance(opened, Run) else opened.folder, keywords)
    return diagnose_own(opened, keywords)
