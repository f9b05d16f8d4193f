"""``compare`` and ``diagnose`` of a model's run: what their keywords ask for."""

from typing import Any

from precaudit.recording.runs.reader import Run
from precaudit.workflows.keywords import FILTERS, Keywords, check_keywords, looking, option_names, progress_of


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
