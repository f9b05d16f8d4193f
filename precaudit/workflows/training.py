"""Two trainings from one state, step for step: the same steps in A and in B, and what parts them."""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precaudit.errors import UserError
from precaudit.progress import Progress
from precaudit.workflows.bisect_sources import Given, given_among, sides_of
from precaudit.writing import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from precaudit.diagnosis.bisection.processes import Site
    from precaudit.diagnosis.training.records import Training, TrainingTensor

FOUND, TENSORS = "training.json", "training.jsonl"
NAMES = ("good", "bad")  # of the sides' runs
BY = ("programs", "flags", "commits", "versions")
OTHER = {
    "policy": "a program's formats are its own: give two programs (--by programs), or a variable it reads (--by flags)",
    "layers": "steps are of a program, which has no layers of ours",
    "lines": "give two programs, --by programs",
    "passes": "give XLA_FLAGS of both by --by flags",
}
# The options of a search, which says nothing of two trainings.
REFUSED = ("test", "test_command", "find", "raised", "against", "prompts", "text", "prompt", "policy", "allow_field")


@dataclass(frozen=True)
class TrainingSide:
    """A side: its program, in words what it is, and the folder of its run."""

    reference: str
    words: str
    folder: Path


def compare_training(
    given: Given, steps: int, drawn: int, progress: Progress
) -> "tuple[Training, list[TrainingTensor]]":
    """Run the same steps of a training in A and in B, write what parts them, and return that.

    Raises UserError for what does not go together, and where a side does not run.
    """
    import msgspec

    from precaudit.diagnosis.training.conclusion import TrainingQuestion, conclude
    from precaudit.diagnosis.training.judged import Held, Side
    from precaudit.diagnosis.training.values import chains_folder
    from precaudit.recording.runs.folders import make_folder
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.schema.records.lines import write_lines

    sides = _sides(given)
    if (given.folder / FOUND).exists() and not given.force:
        raise UserError(f"{given.folder} holds a training that was compared; give another -o, or --force")
    make_folder(given.folder)
    good, bad = sides
    for i, side in enumerate(sides):
        progress.advance(i, 3, f"{steps} steps in {'AB'[i]}")
        _record(given, side, steps, 0 if i else drawn, good.folder if i else None)
    progress.advance(2, 3, "B against A")
    a, b = (Side(open_program_run(s.folder), chains_folder(s.folder)) for s in sides)
    held = Held(a, b)
    records = list(held.records())
    notes = []
    if a.opened.record.weights != b.opened.record.weights:
        notes.append("what the programs are given beside the state, or close over, is not the same in A and B")
    asked = TrainingQuestion(given.subject, given.by, good.words, bad.words, steps, drawn)
    found = conclude(asked, records, held.squares, tuple(held.lacking), notes)
    write_lines(given.folder / TENSORS, records)
    write_whole(given.folder / FOUND, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", inside=True)
    return found, records


def _sides(given: Given) -> tuple[TrainingSide, TrainingSide]:
    """Return A and B; raises UserError for options that say nothing of them."""
    from precaudit.diagnosis.bisection.trials import RUNS
    from precaudit.recording.programs.loading import is_reference

    if given.by not in BY:
        raise UserError(f"--steps, --by {given.by}: {OTHER[given.by]}")
    if other := given_among(given, REFUSED):
        raise UserError(f"--steps compares A and B and searches nothing; leave out {other}")
    if given.between is not None and given.by != "versions":
        raise UserError(f"--by {given.by} takes no --between")
    if given.jobs > 1:
        raise UserError("--steps runs A and then B, which begins from A's state; leave out --jobs")
    words = (given.good, given.bad)
    if given.by == "programs":
        words = (given.good or given.subject, given.bad)
    if words[0] is None or words[1] is None:
        raise UserError(f"--steps, --by {given.by}: give both, --good A --bad B")
    references = (words[0], words[1]) if given.by == "programs" else (given.subject, given.subject)
    for x in references:
        if not is_reference(x):
            raise UserError(f"--steps: {x} is no training program; give FILE.py:NAME")
    runs = given.folder / RUNS
    good, bad = (
        TrainingSide(r, w or "nothing", runs / f) for r, w, f in zip(references, words, ("good", "bad"), strict=True)
    )
    return good, bad


def _record(given: Given, side: TrainingSide, steps: int, drawn: int, like: Path | None) -> None:
    """Record a side in a process of its own, where it runs."""
    from precaudit.diagnosis.bisection.processes import run_module

    words = [side.reference, str(side.folder.resolve()), "--steps", str(steps), "--drawn", str(drawn)]
    words += [] if like is None else ["--like", str(like.resolve())]
    words += [] if given.points is None else ["--points", given.points]
    with _site(given, like is not None) as site:
        try:
            run_module(site, words, "precaudit.diagnosis.training")
        except UserError as error:
            raise UserError(f"{'A' if like is None else 'B'} ({side.words}): {error}") from None


@contextmanager
def _site(given: Given, is_bad: bool) -> "Iterator[Site]":
    from precaudit.diagnosis.bisection.processes import Site

    if given.by == "programs":
        yield Site()
        return
    between = sides_of(given, given.good or "", given.bad or "")
    with between.site(between.changes if is_bad else ()) as site:
        yield site
