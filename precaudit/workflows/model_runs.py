"""``trace``, ``compare`` and ``diagnose`` of a model and its run: what their keywords ask for."""

from pathlib import Path
from typing import Any

from precaudit.errors import UserError
from precaudit.recording.runs.reader import Run
from precaudit.workflows.keywords import (
    FILTERS,
    Keywords,
    check_keywords,
    looking,
    option_names,
    options_of,
    progress_of,
    prompts_of,
    selection,
    take_keywords,
)

LOADED = ("policy", "settings", "device", "parts", "allow", "mesh")  # what ``load`` takes beside a name
SKETCHED = ("decode_steps", "force", "command")  # what sketches of a model take, of what ``trace`` does


def trace_model(subject: Any, output: Path | str, keywords: Keywords) -> Any:
    """Run and record a model, as the keywords of ``trace`` say; a list of runs where ``sketch`` keeps no tensors."""
    from precaudit.recording.tracing.subject import load
    from precaudit.recording.tracing.trace import TraceOptions, trace

    names = ("prompts", "select", "options", "progress", "sketch")
    check_keywords("trace", keywords, (*names, *FILTERS, *option_names(TraceOptions), *LOADED))
    loading = take_keywords(keywords, LOADED)
    if loading and not isinstance(subject, str):
        raise UserError(f"{', '.join(loading)} belong to precaudit.load, which made this subject")
    prompts = prompts_of(keywords.pop("prompts", None))
    sketch = keywords.pop("sketch", None)
    if sketch is not None:
        some = ("select", "points", "phases", "prompt", *SKETCHED, "progress")
        check_keywords("trace of a model with sketch=", keywords, some)
    select = selection(keywords.pop("select", None), keywords)
    options = options_of(TraceOptions, keywords.pop("options", None), keywords, TraceOptions())
    with progress_of(keywords.pop("progress", None)) as progress:
        subject = load(subject, **loading) if isinstance(subject, str) else subject
        if sketch is not None:
            return _sketch_model(subject, Path(output), (prompts, select), (options, sketch), progress)
        return trace(subject, output, prompts, select, options, progress)


def _sketch_model(subject: Any, folder: Path, what: tuple[Any, Any], how: tuple[Any, int], progress: Any) -> Any:
    """Run a model and keep sketches: a run for each length of prompts."""
    from precaudit.interpreters.jaxpr.sketches import check_projections
    from precaudit.recording.programs.sketching import programs_by_length, sketch_programs
    from precaudit.recording.programs.tracing import ProgramTraceOptions
    from precaudit.recording.tracing.trace import encode_prompts
    from precaudit.schema.selection import Selection

    (prompts, some), (options, sketch) = what, how
    check_projections(sketch)
    select = some or Selection()
    found = encode_prompts(subject, prompts, select, progress.say)
    own = ProgramTraceOptions(force=options.force, command=options.command, sketch=sketch)
    return sketch_programs(
        programs_by_length(subject, found, options.decode_steps), folder, select, own, progress.advance
    )


def compare_model(run: Run, against: Any, keywords: Keywords) -> Any:
    """Compare a model's run with FP64 or with another run, as the keywords of ``compare`` say."""
    from precaudit.references.comparison.compare import CompareOptions
    from precaudit.references.comparison.compare import compare as compared

    known = option_names(CompareOptions)
    check_keywords("compare", keywords, ("select", "options", "subject", *FILTERS, *known, "progress"))
    run, select, options = looking(run, keywords, CompareOptions())
    with progress_of(keywords.pop("progress", None)) as progress:
        other = getattr(against, "folder", against)
        return compared(run, other, select, options, progress.advance, keywords.pop("subject", None))


def diagnose_model(run: Any, keywords: Keywords) -> Any:
    """Find the causes of the errors of a model's run, as the keywords of ``diagnose`` say."""
    from precaudit.diagnosis.diagnose import diagnose as found
    from precaudit.diagnosis.diagnose import lift_subject
    from precaudit.references.comparison.compare import CompareOptions

    names = ("select", "options", "subject", "lift", "objective")
    check_keywords("diagnose", keywords, (*names, *FILTERS, *option_names(CompareOptions), "progress"))
    run, select, options = looking(run, keywords, CompareOptions(accum=()))
    subject = lift_subject(run, keywords.pop("subject", None), options, keywords.pop("lift", None))
    with progress_of(keywords.pop("progress", None)) as progress:
        return found(run, select, options, progress.advance, subject, **keywords)
