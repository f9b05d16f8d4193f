"""Faults of the exam that take something away from a run, or bend it: each alters a copy and says what must be said.

Hashes are entered anew after each change, as if the run had been recorded so: only the gate can notice.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from precaudit.errors import UserError
from precaudit.judging.baselines import freeze
from precaudit.judging.gate import gate
from precaudit.models.checkpoints.safetensors_files import WORDS, SafetensorsFiles
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.written import Comparison
from precaudit.references.comparison.compare import CompareOptions, compare

Row = dict[str, Any]
PROMPTS = ("p0", "p1")  # of the run that is altered


@dataclass(frozen=True)
class Absence:
    """``alter`` changes a run's folder; ``status``: what the gate has to say of it; ``point``: where, if anywhere."""

    name: str
    alter: Callable[[Path], None]
    status: str
    point: str = ""


def lines(name: str, keep: Callable[[Row], bool]) -> Callable[[Path], None]:
    """Keep some lines of a file."""

    def alter(folder: Path) -> None:
        rows = [json.loads(x) for x in (folder / name).read_text().splitlines()]
        write(folder, name, [r for r in rows if keep(r)])

    return alter


def write(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    raw = json.loads((folder / "run.json").read_text())
    raw["hashes"][name] = file_hash(folder / name)
    (folder / "run.json").write_text(json.dumps(raw))


def twice(folder: Path) -> None:
    rows = [json.loads(x) for x in (folder / "points.jsonl").read_text().splitlines()]
    write(folder, "points.jsonl", [*rows, rows[0]])


def tensor(point: str, phase: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Replace a tensor of the middle layer, its shape, format and hash entered as they then are."""

    def alter(folder: Path) -> None:
        rows = [json.loads(x) for x in (folder / "points.jsonl").read_text().splitlines()]
        row = next(r for r in rows if (r["point"], r["phase"], r["layer"]) == (point, phase, 1))
        path = folder / row["file"]
        files = SafetensorsFiles.open([path], WORDS)
        held = {k: np.array(files.read_tensor(k)) for k in files.entries}
        new = held[row["key"]] = np.ascontiguousarray(change(held[row["key"]]))
        save_file(held, path)
        row |= {"shape": list(new.shape), "dtype": new.dtype.name, "hash": tensor_hash(new)}
        if new.shape[0] < held[row["key"]].shape[0]:
            row["positions"] = [0, len(new)]
        write(folder, "points.jsonl", rows)

    return alter


def stale_row(x: Any) -> Any:
    x = x.copy()
    x[3] = x[2]
    return x


def other_format(x: Any) -> Any:
    return x.astype(np.float16 if x.dtype == np.float32 else np.float32)


def is_tensor(r: Row) -> bool:
    return (r["point"], r["phase"], r["layer"], r["prompt"]) == ("attn_out", "prefill", 1, PROMPTS[0])


ABSENCES = (
    Absence("tensor missing", lines("points.jsonl", lambda r: not is_tensor(r)), "missing", "attn_out"),
    Absence("layer missing", lines("points.jsonl", lambda r: r["layer"] != 1), "missing", "q"),
    Absence("prompt missing", lines("prompts.jsonl", lambda r: r["id"] != PROMPTS[1]), "missing"),
    Absence("prompt's tensors missing", lines("points.jsonl", lambda r: r["prompt"] != PROMPTS[1]), "missing", "q"),
    Absence("decode missing", lines("points.jsonl", lambda r: r["phase"] != "decode"), "missing", "attn_out"),
    Absence("steps dropped", lines("steps.jsonl", lambda r: r["phase"] != "decode"), "missing"),
    Absence("line twice", twice, "refused"),
    Absence("dtype changed", tensor("attn_out", "prefill", other_format), "fail", "attn_out"),
    Absence("shape truncated", tensor("attn_out", "prefill", lambda x: x[..., :-1]), "fail", "attn_out"),
    Absence("transposed", tensor("q", "prefill", lambda x: x.transpose(1, 0, 2)), "fail", "q"),
    Absence("stale KV row", tensor("k_cache", "decode", stale_row), "fail", "k_cache"),
)


def judged(honest: Path, absence: Absence, scratch: Path) -> tuple[str, bool]:
    """Return (what the gate says of the altered run, whether that is right)."""
    shutil.rmtree(scratch, ignore_errors=True)
    folder = Path(shutil.copytree(honest, scratch))
    absence.alter(folder)
    try:
        found = gate(compare(folder, options=CompareOptions(accum=(), cache=honest.parent / "refs", fresh=True)))
    except UserError:
        return "refused", absence.status == "refused"
    here = {v.status for v in found.verdicts if not absence.point or v.point == absence.point}
    return ", ".join(sorted(here)) or "pass", absence.status in here and found.exit_code != 0


def against_baseline(found: Comparison, folder: Path) -> tuple[str, bool]:
    """Return what the gate says where the baseline holds what the run was not asked for (the other side)."""
    path = folder / "baseline.jsonl"
    freeze(found, path)
    fewer = Comparison(**{**found.__dict__, "errors": [e for e in found.errors if e.phase != "decode"]})
    status = {v.status for v in gate(fewer, baseline=path).verdicts}
    return ", ".join(sorted(status)), status == {"missing"}


def between_runs(honest: Path, scratch: Path) -> tuple[str, bool]:
    """Return what two runs compared say where either of them lacks a tensor."""
    shutil.rmtree(scratch, ignore_errors=True)
    folder = Path(shutil.copytree(honest, scratch))
    ABSENCES[0].alter(folder)
    told = [
        [e.missing for e in compare(a, against=b, options=CompareOptions(accum=())).errors if e.missing is not None]
        for a, b in ((folder, honest), (honest, folder))
    ]
    return "missing" if all(told) else "pass", [len(x) for x in told] == [1, 1]
