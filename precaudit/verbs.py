"""``trace``, ``compare``, ``diagnose``: of models that precaudit runs, and of programs of one's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from precaudit.dumps.runs import Imported, is_imported
from precaudit.programs.program import Program
from precaudit.runs.programs import Opened, is_program_run

if TYPE_CHECKING:
    from precaudit.between import Between
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.diagnosis.programs import Diagnosed
    from precaudit.records import ErrorRecord
    from precaudit.runs.written import Comparison
    from precaudit.store import Run
    from precaudit.tracing.subject import Subject


@overload
def trace(subject: Program, output: Path | str, **options: Any) -> Opened: ...
@overload
def trace(subject: "Subject | str", output: Path | str, *given: Any, **options: Any) -> "Run": ...
def trace(subject: Any, output: Path | str, *given: Any, **options: Any) -> Any:
    """Run and record ``subject`` into the folder ``output``; return the run opened.

    A Program: as ``precaudit.programs.tracing.trace``; a Subject or a model's name: ``precaudit.tracing.trace.trace``.
    """
    if isinstance(subject, Program):
        from precaudit.programs.tracing import trace as traced

        return traced(subject, output, *given, **options)
    from precaudit.tracing.trace import trace as recorded

    return recorded(subject, output, *given, **options)


@overload
def compare(run: Imported, *given: Any, **options: Any) -> "Between": ...
@overload
def compare(run: Opened, *given: Any, **options: Any) -> "list[ErrorRecord]": ...
@overload
def compare(run: "Run | Path | str", *given: Any, **options: Any) -> "Comparison": ...
def compare(run: Any, *given: Any, **options: Any) -> Any:
    """Compute a run's errors and write them beside it.

    Of a program's run: ``precaudit.comparison.programs.compare``; against another run, where one of the two is a
    program's or imported: ``precaudit.between.compare_runs``; else ``precaudit.comparison.compare.compare``.
    """
    other = options.get("against", given[0] if given else None)
    if _imported(run) or _imported(other) or (_of_a_program(run) and (_of_a_program(other) or _a_models(other))):
        from precaudit.between import compare_runs

        return compare_runs(_folder(run), *map(_folder, given), **options)
    if _of_a_program(run):
        from precaudit.comparison.programs import compare as compared

        return compared(run, *given, **options)
    from precaudit.comparison.compare import compare as judged

    return judged(run, *given, **options)


@overload
def diagnose(run: Opened, *given: Any, **options: Any) -> "Diagnosed": ...
@overload
def diagnose(run: "Run | Path | str", *given: Any, **options: Any) -> "Diagnosis": ...
def diagnose(run: Any, *given: Any, **options: Any) -> Any:
    """Find the causes of a run's errors.

    Of a program's run: ``precaudit.diagnosis.programs.diagnose``; else ``precaudit.diagnosis.diagnose.diagnose``.
    """
    if _of_a_program(run):
        from precaudit.diagnosis.programs import diagnose as named
        from precaudit.runs.programs import open_program_run

        return named(run if isinstance(run, Opened) else open_program_run(run), *given, **options)
    from precaudit.diagnosis.diagnose import diagnose as found

    return found(run, *given, **options)


def _folder(run: Any) -> Any:
    return getattr(run, "folder", run)


def _imported(run: Any) -> bool:
    return isinstance(run, Imported) or (isinstance(run, Path | str) and is_imported(run))


def _a_models(run: Any) -> bool:
    return isinstance(run, Path | str) and (Path(run) / "run.json").is_file()


def _of_a_program(run: Any) -> bool:
    return isinstance(run, Opened) or (isinstance(run, Path | str) and is_program_run(run))
