"""The folder a run is written to: made ready, replaced only where it holds a run of ours, with space on the disk."""

import glob
import os
import shutil
from pathlib import Path

from precaudit.errors import UserError
from precaudit.mirrors import commit
from precaudit.numbers.bytes_text import bytes_text
from precaudit.recording.runs.kinds import check_ours, kind_of, tag_of
from precaudit.recording.runs.manifest import read_manifest
from precaudit.schema.records.manifests import MANIFEST
from precaudit.writing import PART, temporary

OWN_NAMES = {
    "run.json",
    "prompts.jsonl",
    "steps.jsonl",
    "points.jsonl",
    "tensors",
    "errors.jsonl",
    "prefill_decode.jsonl",
    "compare.json",
    "report.md",
    "against",
    "findings.jsonl",
    "formula.json",
    "remedies.jsonl",
    "shares.jsonl",
    "kept.json",
    "lines.jsonl",
    "program.json",
    "compared.json",
    "dump.json",
    "batches.jsonl",
    "aligned.toml",
    "shards",
}
HELD = {"model": "a run", "program": "a program's run", "dump": "an imported run", "sketches": "a sketched run"}
LENGTH = "tokens-"  # begins the name of the run of a length, in the folder of a model's sketches
NO_TENSORS = "{folder} keeps no tensors: compare it with another such run (precaudit compare {folder} RUN)"


def runs_of_lengths(folder: Path) -> list[Path]:
    """Return the runs in the folder of a model's sketches, one for each length of prompts; none in any other."""
    every = (path for path in folder.glob(f"{LENGTH}*") if path.name.removeprefix(LENGTH).isdigit())
    return sorted(path for path in every if tag_of(path) == "program")


def _replaceable(folder: Path, force: bool) -> None:
    """Raise UserError where a folder is not a run, whole or cut off before its run.json, that may be replaced."""
    if not folder.is_dir():
        raise UserError(f"{folder} exists and is not a run: choose another -o")
    names = [p.name for p in folder.iterdir()]
    lengths = {path.name for path in runs_of_lengths(folder)}
    foreign = [name for name in names if name not in OWN_NAMES | lengths and not name.endswith(PART)]
    kind = kind_of(folder) or ("sketches" if lengths else None)
    if kind is not None:
        if not force and not foreign:
            raise UserError(f"{folder} holds {HELD[kind]} already: choose another -o, or --force to replace it")
        try:
            if tag_of(folder) == "model":  # what others write may have that name, too
                read_manifest(folder / MANIFEST)
            elif not lengths:
                check_ours(folder)
        except UserError as error:
            raise UserError(f"{folder} is not a run of ours ({error}): choose another -o") from None
        if foreign:
            raise UserError(f"{folder} holds {foreign[0]!r}, which is not part of a run: choose another -o")
    elif foreign or not force:
        hint = "" if foreign else ", or --force to replace what a run that was cut off left"
        raise UserError(f"{folder} exists and is not a run: choose another -o{hint}")


def follow_link(folder: Path) -> Path:
    """Return the folder that a link leads to, so that what is replaced is that; any other as it was given."""
    return folder.resolve() if folder.is_symlink() else folder


def check_folder(folder: Path, force: bool) -> bool:
    """Return whether something is in ``folder`` that a new run may replace; raises UserError where it may not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        _replaceable(folder, force)
        return True
    return False


def prepare_folder(folder: Path, force: bool) -> None:
    """Make ``folder`` ready for a new run; raises UserError when something is there or it cannot be written."""
    folder = follow_link(folder)
    if check_folder(folder, force):
        folder.rename(temporary(folder))  # at once: what is killed while it deletes leaves no half of a run behind
    for gone in folder.parent.glob(f".{glob.escape(folder.name)}.????????{PART}"):
        if gone.is_dir():  # of this run, or of one that was killed here
            shutil.rmtree(gone)
    make_folder(folder)
    commit(folder)  # what was there is gone in its bucket, too, before anything new is there


def make_folder(folder: Path) -> None:
    """Make a folder where it is not there; raises UserError when it cannot be made, or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable")


def check_space(folder: Path, needed: int, less: str = "record less with --layers, --points or --positions") -> None:
    """Raise UserError when the disk under ``folder`` has less than ``needed`` bytes left; ``less``: what needs less."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"no space: the run needs about {bytes_text(needed)}, {place} has {bytes_text(free)} left; "
            f"{less}, or choose another -o"
        )
