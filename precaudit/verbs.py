"""``trace``, ``compare``, ``diagnose``: of models that precaudit runs, and of programs of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from precaudit.dumps.runs import Imported, is_imported
from precaudit.errors import UserError
from precaudit.keywords import FILTERS, Keywords, check, names_of, options_of, progress_of, prompts_of, selection, taken
from precaudit.programs.program import Program
from precaudit.runs.programs import MANIFEST, Opened, ProgramErrors, is_program_run

if TYPE_CHECKING:
    from precaudit.between import Between
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.runs.written import Comparison
    from precaudit.store import Run
    from precaudit.tracing.subject import Subject


LOADED = ("policy", "settings", "device", "parts", "allow")  # what ``load`` takes beside a name


@overload
def trace(subject: Program, output: Path | str, *given: Any, **keywords: Any) -> Opened: ...
@overload
def trace(subject: "Subject | str", output: Path | str, *given: Any, **keywords: Any) -> "Run": ...
def trace(subject: Any, output: Path | str, *given: Any, **keywords: Any) -> Any:
    """Run and record ``subject`` into the folder ``output``; return the run opened.

    ``subject``: a name or path as ``load`` takes it, a Subject, or a Program.

    Of a model: ``prompts``, a list of texts, {id: text} or the path of a JSONL file (None: the shipped ones); filters
    ``layers="0,15:18"``, ``points="q,k"``, ``phases``, ``positions``, ``prompt`` (ids), or ``select=Selection(…)``;
    ``decode_steps``, ``batch``, ``pad``, ``tokens_from``, ``force``, or ``options=``; of a name also what ``load``
    takes, such as ``policy="fp32"``. Of a Program: ``layers`` (steps of its scans), ``points``, ``prompt`` (cases),
    ``strict``, ``force`` and ``taps="both"`` (its ``checkpoint_name`` taps, ``"own"``, and ``"automatic"`` ones).
    ``progress=True`` shows a bar.
    Raises UserError before anything is written where something asked for is not possible.

    >>> run = precaudit.trace("tiny", "runs/a", prompts=["Hello"], layers="0", force=True)  # doctest: +SKIP
    """
    if isinstance(subject, Program):
        return _trace_program(subject, output, given, keywords)
    return _trace_model(subject, output, given, keywords)


def _trace_model(subject: Any, output: Path | str, given: tuple[Any, ...], keywords: Keywords) -> Any:
    from precaudit.tracing.subject import load
    from precaudit.tracing.trace import Options
    from precaudit.tracing.trace import trace as recorded

    names = ("prompts", "select", "options", "progress")
    keywords = _positional("trace", names, given, keywords)
    check("trace", keywords, (*names, *FILTERS, *names_of(Options), *LOADED))
    loading = taken(keywords, LOADED)
    if loading and not isinstance(subject, str):
        raise UserError(f"{', '.join(loading)} belong to precaudit.load, which made this subject")
    prompts = prompts_of(keywords.pop("prompts", None))
    select = selection(keywords.pop("select", None), keywords)
    options = options_of(Options, keywords.pop("options", None), keywords, Options())
    with progress_of(keywords.pop("progress", None)) as progress:
        subject = load(subject, **loading) if isinstance(subject, str) else subject
        return recorded(subject, output, prompts, select, options, progress)


def _trace_program(subject: Program, output: Path | str, given: tuple[Any, ...], keywords: Keywords) -> Any:
    from precaudit.programs.tracing import steps_of
    from precaudit.programs.tracing import trace as traced
    from precaudit.selection import names_in, parse_layers

    def named(given: Any, what: str) -> tuple[str, ...] | None:
        return names_in(given, what) if isinstance(given, str) else None if given is None else tuple(given)

    names = ("reference", "force", "command", "tell", "layers", "strict")
    filters = ("points", "prompt", "taps")
    keywords = _positional("trace", names, given, keywords)
    check("trace of a Program", keywords, (*names, *filters, "progress"))
    layers, taps = keywords.pop("layers", None), keywords.pop("taps", "both")
    asked, cases = (named(keywords.pop(name, None), what) for name, what in (("points", "point"), ("prompt", "case")))
    subject = subject if cases is None else subject.some(cases)
    asked = None if asked is None or "all" in asked else asked
    if isinstance(layers, str | int):
        layers = parse_layers(str(layers), steps_of(subject, taps))
    with progress_of(_telling(keywords)) as progress:
        how = {"layers": layers, "taps": taps, "asked": asked, "tell": progress.advance}
        return traced(subject, output, **how, **keywords)


@overload
def compare(run: Imported, *given: Any, **keywords: Any) -> "Between": ...
@overload
def compare(run: Opened, *given: Any, **keywords: Any) -> ProgramErrors: ...
@overload
def compare(run: "Run | Path | str", *given: Any, **keywords: Any) -> "Comparison": ...
def compare(run: Any, *given: Any, **keywords: Any) -> Any:
    """Compute a run's errors and write them beside it.

    Of a model's run: ``against``, another run; filters ``layers``, ``points``, ``phases``, ``prompt`` or ``select=``;
    ``accum="float16"`` or a list (formats to emulate sums in, ``()`` for none), ``formula=True``, ``model``,
    ``partial``, ``fresh``, ``cache``, or ``options=``; ``subject``. Of a Program's run: ``program``, ``reference``.
    Of an imported run, or a Program's and another: ``against`` alone. ``progress=True`` shows a bar.

    >>> found = precaudit.compare("runs/a", accum=(), formula=True)  # doctest: +SKIP
    """
    other = keywords.get("against", given[0] if given else None)
    programs = _of_a_program(run) or _of_a_program(other)
    if _imported(run) or _imported(other) or (programs and _a_run(run) and _a_run(other)):
        from precaudit.between import compare_runs

        keywords = _positional("compare", ("against", "tell"), given, keywords)
        check("compare of these two runs", keywords, ("against", "tell", "progress"))
        with progress_of(_telling(keywords)) as progress:
            return compare_runs(_folder(run), _folder(keywords["against"]), progress.advance)
    if _of_a_program(run):
        from precaudit.comparison.programs import compare as compared

        names = ("program", "reference", "tell")
        keywords = _positional("compare", names, given, keywords)
        check("compare of a Program's run", keywords, (*names, "progress"))
        with progress_of(_telling(keywords)) as progress:
            return compared(run, tell=progress.advance, **keywords)
    return _compare_model(run, given, keywords)


def _compare_model(run: Any, given: tuple[Any, ...], keywords: Keywords) -> Any:
    from precaudit.comparison.compare import Options
    from precaudit.comparison.compare import compare as compared

    names = ("against", "select", "options", "tell", "subject")
    keywords = _positional("compare", names, given, keywords)
    check("compare", keywords, (*names, *FILTERS, *names_of(Options), "progress"))
    run, select, options = _looking(run, keywords, Options())
    with progress_of(_telling(keywords)) as progress:
        against = _folder(keywords.pop("against", None))
        return compared(run, against, select, options, progress.advance, keywords.pop("subject", None))


def _looking(run: Any, keywords: Keywords, default: Any) -> tuple[Any, Any, Any]:
    """Return a run, opened where filters need what it holds, and what select and options of it the keywords make."""
    from precaudit.store import Run, open_run

    if isinstance(keywords.get("accum"), str):
        text = keywords["accum"]
        keywords["accum"] = () if text == "none" else tuple(x.strip() for x in text.split(",") if x.strip())
    options = options_of(type(default), keywords.pop("options", None), keywords, default)
    before = keywords.pop("select", None)
    if before is None and any(keywords.get(name) is not None for name in FILTERS):
        run = run if isinstance(run, Run) else open_run(run, options.partial)
    return run, selection(before, keywords, run.record.requested if isinstance(run, Run) else None), options


@overload
def diagnose(run: Opened, *given: Any, **keywords: Any) -> "Diagnosed": ...
@overload
def diagnose(run: "Run | Path | str", *given: Any, **keywords: Any) -> "Diagnosis": ...
def diagnose(run: Any, *given: Any, **keywords: Any) -> Any:
    """Find the causes of a run's errors.

    Of a model's run: the keywords of ``compare`` but ``against``, and ``lift``, ``objective``. Of a Program's run:
    ``program``, ``objective``. ``progress=True`` shows a bar.

    >>> precaudit.diagnose("runs/a", layers="2", points="scores")  # doctest: +SKIP
    """
    if _of_a_program(run):
        from precaudit.diagnosis.programs import diagnose as named
        from precaudit.runs.programs import open_program_run

        names = ("program", "tell", "objective")
        keywords = _positional("diagnose", names, given, keywords)
        check("diagnose of a Program's run", keywords, (*names, "progress"))
        with progress_of(_telling(keywords)) as progress:
            return named(run if isinstance(run, Opened) else open_program_run(run), tell=progress.advance, **keywords)
    return _diagnose_model(run, given, keywords)


def _diagnose_model(run: Any, given: tuple[Any, ...], keywords: Keywords) -> Any:
    from precaudit.comparison.compare import Options
    from precaudit.diagnosis.diagnose import diagnose as found

    names = ("select", "options", "tell", "subject", "lift", "objective")
    keywords = _positional("diagnose", names, given, keywords)
    check("diagnose", keywords, (*names, *FILTERS, *names_of(Options), "progress"))
    run, select, options = _looking(run, keywords, Options(accum=()))
    with progress_of(_telling(keywords)) as progress:
        return found(run, select, options, progress.advance, **keywords)


def _positional(verb: str, names: Sequence[str], given: tuple[Any, ...], keywords: Keywords) -> Keywords:
    """Return the keywords with what was given by position; raises UserError for too many, or for one given twice."""
    if len(given) > len(names):
        raise UserError(f"precaudit.{verb} takes {', '.join(names)} by position; {len(given)} were given")
    placed = dict(zip(names, given, strict=False))
    if twice := [name for name in placed if name in keywords]:
        raise UserError(f"precaudit.{verb}: {twice[0]} was given twice")
    return {**placed, **keywords}


def _telling(keywords: Keywords) -> Any:
    """Return where to report to, as ``progress`` or, told by its older name, ``tell``; taken out of the keywords."""
    return taken(keywords, ("tell", "progress")).popitem()[1] if {"tell", "progress"} & keywords.keys() else None


def _folder(run: Any) -> Any:
    return getattr(run, "folder", run)


def _imported(run: Any) -> bool:
    return isinstance(run, Imported) or (isinstance(run, Path | str) and is_imported(run))


def _a_run(run: Any) -> bool:
    folder = _folder(run)
    return isinstance(folder, Path | str) and any((Path(folder) / name).is_file() for name in ("run.json", MANIFEST))


def _of_a_program(run: Any) -> bool:
    return isinstance(run, Opened) or (isinstance(run, Path | str) and is_program_run(run))
