"""What a sitting reads of a run: cells as its records come, then what the gate says, and whether files have changed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from precaudit.errors import UserError
from precaudit.judging.verdicts import STATUSES
from precaudit.recording.opening import against_folder
from precaudit.recording.runs.kinds import MANIFESTS, manifest_of
from precaudit.reports.cells import Cell, CellGroups, first_map, map_cells, program_order, with_verdicts
from precaudit.reports.differences import pair_cells
from precaudit.reports.findings import Causes, causes_at, causes_by_place, first_of
from precaudit.reports.gathered import Gathered, Recalled, gather, recall_run
from precaudit.reports.headline import headline
from precaudit.reports.report import Headline
from precaudit.reports.session.filters import look_of
from precaudit.schema.filed import Filed
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.selection import Filters

AGAINST = "against"  # the map of a run beside another
WATCHED = (*MANIFESTS, "compare.json", "compared.json", "errors.jsonl", "findings.jsonl", "batches.jsonl")
Signature = tuple[tuple[str, int, int], ...]
PAUSE = 0.15  # seconds between pictures of what was read so far


@dataclass(frozen=True)
class Shown:
    """What a sitting shows: cells by map, ``judged`` once the gate has been over them; ``run``: None where it waits."""

    run: Recalled | None = None
    maps: Mapping[str, Sequence[Cell]] = field(default_factory=dict)
    judged: Gathered | None = None
    causes: Causes = field(default_factory=dict)
    waiting: str = ""

    @property
    def headline(self) -> Headline:
        """The first finding, else what the gate says, else what is being done."""
        if self.judged is None:
            return Headline("?", self.waiting or "reading and judging the records …")
        if self.judged.findings:
            return first_of(self.judged.findings)
        return headline(self.judged.judgement, str(self.judged.folder))

    def causes_of(self, c: Cell) -> list[str]:
        """Return what diagnosis says of a cell that does not pass."""
        if self.judged is None or c.status == "pass":
            return []
        return causes_at(self.causes, self.judged.findings, c.layer, c.point)

    @property
    def first(self) -> str:
        """The map that holds the cell to look at first."""
        return first_map(self.maps) or "local"

    def counts(self, kind: str) -> str:
        """Return how many records of a map have each status, in words."""
        found: Counter[str] = Counter()
        for c in self.maps.get(kind, ()):
            found.update(c.counts)
        return ", ".join(f"{found[status]:,} {status}" for status in STATUSES if found[status])

    @property
    def order(self) -> list[str]:
        """The points as the program makes them."""
        every = (c for name in ("local", "forward", "formula", AGAINST) for c in self.maps.get(name, ()))
        return program_order(list(every))


def read_run(run: Recalled, filters: Filters, other: Path | None, show: Callable[[Shown], object]) -> Shown:
    """Read and judge a compared run, its records as they come given to ``show``; raises UserError as ``recall_run``.

    ``other``: the run that it was compared with, whose map is shown, too.
    """
    look, last = look_of(run, filters), monotonic()
    keeps = _holds_all if look is None else look.holds
    names = tuple(CellGroups.names)

    def tell(groups: CellGroups) -> None:
        nonlocal last
        if monotonic() - last > PAUSE:
            show(Shown(run, {name: groups.cells(name) for name in names}))
            last = monotonic()

    maps = map_cells(run.errors, keeps=keeps, told=tell)
    show(Shown(run, maps))
    judged = gather(run)
    if judged.judgement.counts.get("input suspect"):
        maps = map_cells(run.errors, judged.suspects(), keeps=keeps)
    maps = with_verdicts(maps, filter(keeps, judged.judgement.verdicts))
    if other is not None:
        maps[AGAINST] = [c for c in _against(run, other) if keeps(c.worst)]
    return Shown(run, maps, judged, causes_by_place(judged.judgement, judged.findings or ()))


def _holds_all(_: object) -> bool:
    return True


def _against(run: Recalled, other: Path) -> list[Cell]:
    """Return the cells of a run beside another, whose records ``compare`` has written."""
    try:
        theirs = recall_run(other).errors
    except UserError:  # not compared with FP64: what rounding makes of it is not known
        theirs = None
    pairs = Filed(against_folder(run.folder, other) / "errors.jsonl", ERROR_KINDS)
    return pair_cells(pairs, run.errors, theirs)


def signature(folder: Path) -> Signature:
    """Return by what it is told that something was written: the size and time of what lies beside a run."""
    found = []
    for name in WATCHED:
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        found.append((name, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def being_recorded(folder: Path) -> str | None:
    """Return what there is of a run that is being recorded, in words; None where it is whole, or there is none."""
    manifest = manifest_of(folder)
    if not manifest.is_file():
        return None
    try:
        record = msgspec.json.decode(manifest.read_bytes(), type=dict[str, Any])
        batches = (folder / "batches.jsonl").read_bytes().count(b"\n")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if record.get("finished") is not None:
        return None
    return f"{folder} is being recorded: {batches:,} batches are whole. Cells appear once it is compared."


def paused(shown: Shown, why: str) -> Shown:
    """Return what was shown before, where the files are being written anew."""
    return replace(shown, waiting=why)


def require_readable(folder: Path) -> None:
    """Raise UserError, at once, for what is no run, or was not compared and is not being recorded.

    What takes reading to see, such as an altered byte, is seen later.
    """
    compared = any((folder / name).is_file() for name in ("compare.json", "compared.json"))
    if not (compared and (folder / "errors.jsonl").is_file()) and being_recorded(folder) is None:
        recall_run(folder)
