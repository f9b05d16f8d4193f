"""Is it the formula? Where the program's FP64 shadow first leaves the independent FP64 reference."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from precaudit import __version__
from precaudit.comparison.recorded import Recorded
from precaudit.diagnosis.records import Differs, FormulaRecord
from precaudit.errors import UserError
from precaudit.judging.verdicts import LAST, ORDER
from precaudit.numpy_decoder.model import Model
from precaudit.policies import Policy
from precaudit.records import number, write_lines
from precaudit.store import file_hash

replace = msgspec.structs.replace
# Constants a program holds in float32, such as 1/√K or epsilon, leave up to 1e-7 after many layers.
SAME = 1e-6


def establish(recorded: Recorded, subject: Any, model: Model, prompt: str, where: str | None = None) -> FormulaRecord:
    """Return where shadow and reference first part, from formula.json where this very run was asked before.

    ``subject``: the program that was recorded; None: the shipped decoder, if that was recorded, with the weights that
    lie at ``where`` (None: where they were).
    """
    run = recorded.run
    path, identity = run.folder / "formula.json", file_hash(run.folder / "run.json")
    given = FormulaRecord(precaudit=__version__, run=identity, prompt=prompt, differs=(), largest=0.0)
    if subject is None:
        held = _kept(path, given)
        if held is not None:
            return held
        subject = program_of(recorded, model=where)
    if subject is None:
        return replace(given, unknown="the program is not the shipped decoder: diagnose(run, subject=…) tells")
    from precaudit.diagnosis.shadowed import distances  # JAX
    from precaudit.transforms import CannotLift

    try:
        found = list(distances(recorded, subject, model, prompt))
    except CannotLift as error:
        return replace(given, unknown=str(error))
    if not found:
        return replace(given, unknown="neither prefill nor decode was recorded: nothing was compared")
    first: dict[str, Differs] = {}
    for d in sorted(found, key=_order):
        if not float(d.distance) <= SAME:
            first.setdefault(d.phase, d)
    largest = max((float(d.distance) for d in found), default=0.0)
    made = replace(given, differs=tuple(first.values()), largest=number(largest))
    write_lines(path, [made])
    return made


def program_of(recorded: Recorded, device: str = "cpu", model: str | None = None) -> Any:
    """Return the program a run was made with, on a device: the shipped decoder; None where it was another.

    ``model``: where its weights lie now. Raises UserError where the device is not there, or other weights are.
    """
    from precaudit.tracing.subject import load

    record = recorded.run.record
    policy = Policy(**{f.name: record.policy[f.name] for f in fields(Policy)})
    if record.program != "shipped":
        return None
    subject = load(model or record.model.reference, policy, None, device)
    if subject.checkpoint.hashes.sha256() != record.model.sha256:
        raise UserError(f"{subject.reference}: the weights are not those of this run; give the right ones with --model")
    return subject


def _order(d: Differs) -> tuple[int, int, int]:
    return (d.step, LAST if d.layer is None else d.layer, ORDER[d.point])


def _kept(path: Path, wanted: FormulaRecord) -> FormulaRecord | None:
    try:
        held = msgspec.json.decode(path.read_bytes(), type=FormulaRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return held if (held.precaudit, held.run) == (wanted.precaudit, wanted.run) else None
