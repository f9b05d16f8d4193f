"""Error records for other programs: tables (CSV, Parquet) and logs (TensorBoard, Weights & Biases offline)."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import patch

from precaudit.errors import UserError
from precaudit.reports.escaping import csv_cell as cell
from precaudit.reports.escaping import escape_markdown
from precaudit.schema.frames import errors_frame
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError, LocalError
from precaudit.writing import temporary

EXTRAS = {"pyarrow": "frames", "tensorboardX": "tensorboard", "wandb": "wandb"}
ROWS = 5_000  # of a table that are made at a time


class Scalar(NamedTuple):
    """The largest of a number over a point's records in a layer; ``step``: the layer, 0 outside layers."""

    tag: str
    step: int
    value: float


def needs(*names: str) -> None:
    """Raise UserError, with what to install, where a library is not there."""
    for name in names:
        try:
            import_module(name)
        except ImportError:
            raise UserError(f"this needs {name}: pip install 'precaudit[{EXTRAS[name]}]'") from None


def require_free(*folders: Path) -> None:
    """Raise UserError for a folder that is there already: logs of two runs in one are nobody's."""
    for folder in folders:
        if folder.exists() or folder.is_symlink():
            raise UserError(f"{folder} exists: choose another folder")


def frames_of_errors(errors: Iterable[ErrorRecord]) -> Iterator[Any]:
    """Yield error records as frames of so many rows, one frame at least."""
    left, first = iter(errors), True
    while (some := list(islice(left, ROWS))) or first:
        yield errors_frame(some)
        first = False


def write_csv(f: BinaryIO, errors: Iterable[ErrorRecord]) -> None:
    """Write error records into a file as CSV, as ``frame_csv`` has them, a part at a time."""
    for i, frame in enumerate(frames_of_errors(errors)):
        f.write(frame_csv(frame, head=i == 0))


def write_parquet(f: BinaryIO, errors: Iterable[ErrorRecord]) -> None:
    """Write error records into a file as Parquet, whose columns keep their formats; a row group a part."""
    needs("pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    frames = frames_of_errors(errors)
    first = pyarrow.Table.from_pandas(next(frames), preserve_index=False)
    with ParquetWriter(f, first.schema) as table:
        table.write_table(first)
        for frame in frames:
            table.write_table(pyarrow.Table.from_pandas(frame, schema=first.schema, preserve_index=False))


def frame_csv(frame: Any, head: bool = True) -> bytes:
    """Return a frame as CSV: texts in quotes, none that a spreadsheet takes for a formula; numbers as they are."""
    import csv as format_of

    shown = frame.copy()
    for name, dtype in frame.dtypes.items():
        if dtype == "string":
            shown[name] = frame[name].map(cell, na_action="ignore").astype("string")
    text = shown.to_csv(index=False, header=head, quoting=format_of.QUOTE_NONNUMERIC, lineterminator="\n")
    return str(text).encode()


def scalars(errors: Iterable[ErrorRecord]) -> Iterator[Scalar]:
    """Yield of every layer and point the largest local and forward error, and what rounding leaves of the former.

    NaN is larger than any number.
    """
    found: dict[tuple[str, str, int], float] = {}
    for e in errors:
        for what, x in _numbers(e):
            key = (what, e.point, e.layer or 0)
            before, now = found.get(key, 0.0), value(x)
            found[key] = now if now != now or now > before else before
    for (what, point, layer), size in sorted(found.items()):
        yield Scalar(f"{what}/{_tag(point)}", layer, size)


def _numbers(e: ErrorRecord) -> Iterator[tuple[str, Any]]:
    if isinstance(e, LocalError | ForwardError) and e.rel_l2 is not None:
        yield f"{e.kind}_rel_l2", e.rel_l2
    if isinstance(e, LocalError) and e.unexplained is not None and e.unexplained.excess is not None:
        yield "excess", e.unexplained.excess


def _tag(point: str) -> str:
    """Return a point's name as logs take it: ``step~1#2`` is ``step--1-2``; a name of its own holds no hyphen."""
    return re.sub(r"[^\w./-]", "_", point.replace("~", "--").replace("#", "-"))


def tensorboard(folder: Path, errors: Iterable[ErrorRecord], verdict: Iterable[str]) -> None:
    """Write a folder of TensorBoard events, whole or not at all: scalars over layers, and the verdict as text."""
    needs("tensorboardX")

    def write(part: Path) -> None:
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(part)) as log:
            for x in scalars(errors):
                log.add_scalar(x.tag, x.value, x.step)
            log.add_text("verdict", "\n\n".join(map(escape_markdown, verdict)))

    _whole(folder, write)


def wandb_offline(folder: Path, name: str, errors: Iterable[ErrorRecord], verdict: Iterable[str]) -> None:
    """Write a run of Weights & Biases, whole or not at all, without a network; ``wandb sync FOLDER`` sends it later."""
    needs("wandb")

    def write(part: Path) -> None:
        with TemporaryDirectory(prefix="precaudit-") as place, _kept_inside(place):
            _log_offline(Path(place), name, list(scalars(errors)), list(verdict))
            made = next(Path(place).glob("wandb/offline-run-*"))
            part.mkdir()
            shutil.copy(next(made.glob("*.wandb")), part)

    _whole(folder, write)


@contextmanager
def _kept_inside(place: str) -> Iterator[None]:
    """Have wandb write nothing elsewhere: its caches, settings and data."""
    kinds = ("CACHE", "CONFIG", "DATA", "ARTIFACT")
    with patch.dict(os.environ, {f"WANDB_{kind}_DIR": place for kind in kinds}):
        yield


def _log_offline(place: Path, name: str, found: list[Scalar], verdict: list[str]) -> None:
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    config = {"verdict": verdict}
    run = wandb.init(mode="offline", dir=str(place), project="precaudit", name=name, config=config, settings=settings)
    steps: dict[int, dict[str, float]] = {}
    for x in found:
        steps.setdefault(x.step, {})[x.tag] = x.value
    for step in sorted(steps):
        run.log(steps[step], step=step)
    run.finish()


def _whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a folder under a temporary name and rename it; raises UserError where it is there already."""
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = temporary(folder)
    try:
        write(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
