"""The textbook of a program by the model that it is: aligned, and written beside its run as a names map."""

import re
from pathlib import Path
from typing import Any

from precaudit.errors import CannotJudge, UserError
from precaudit.models.checkpoints.names import parse_map
from precaudit.progress import Advance
from precaudit.recording.programs.loading import program_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.alignment.align import align_sides
from precaudit.references.alignment.names import names_text
from precaudit.references.alignment.program_points import run_points
from precaudit.references.alignment.sides import side_of
from precaudit.references.names_map import Names, ProgramNames
from precaudit.schema.toml import toml_bytes
from precaudit.writing import write_whole

WRITTEN = "aligned.toml"


def model_names(opened: Opened, program: Program, model: str, points: Path | None = None, *, tell: Advance) -> Names:
    """Return the textbook of a program's run by the model that it is: tensors by values, configuration by config.json.

    ``points``: a names map without tensors, whose points are taken; None: those that its values are. Raises CannotJudge
    for a tensor that no map can say and where no value is the textbook's, UserError for a model without config.json.
    """
    own, theirs = side_of(program, opened.record.program or "the program"), side_of(model, model)
    config = None if theirs.folder is None else theirs.folder / "config.json"
    if theirs.config is None or config is None or not config.is_file():
        raise UserError(f"{model}: no config.json, which says of which family it is; give --map and --config")
    shown = () if points is not None else run_points(opened, program, theirs.config, lambda n: theirs.tensors[n].read())
    found = names_text(align_sides(own, theirs, tell), shown)
    if lacking := [(n, why) for n, why in found.unsaid.items() if not n.endswith("lm_head.weight")]:
        raise CannotJudge(f"{model}: {len(lacking)} of its tensors are in no map: {lacking[0][0]}: {lacking[0][1]}")
    if not found.shown and points is None:
        raise CannotJudge(f"{model}: no value of the program is its reference's; give points with --map FILE: [points]")
    path = opened.folder / WRITTEN
    write_whole(path, found.text if points is None else _with_points(found.text, points), inside=True)
    return Names(path, config)


def _with_points(text: str, points: Path) -> str:
    """Return a map's text with all that another map says, which has no tensors; raises UserError where it has."""
    data = toml_bytes(points)
    given = parse_map(points, data, ProgramNames)
    if given.tensors or given.ignore:
        raise UserError(f"{points}: it has tensors of its own; leave out --model, or its tensors")
    first, table, tensors = text.partition("[tensors]")
    said = data.decode()
    tables = re.search(r"^\[", said, re.MULTILINE)
    at = len(said) if tables is None else tables.start()
    return f"{first}{said[:at]}\n{table}{tensors}\n{said[at:]}"


def beside_model(
    opened: Opened, program: Program | str | None, reference: Any, model: str | None, tell: Advance
) -> tuple[Program | str | None, Any]:
    """Return a run's program, and what it is held against: with ``model`` the textbook of that, by values."""
    if model is None:
        return program, reference
    if reference is not None:
        raise UserError("give model or reference, not both")
    found = program_of(opened, program)
    return found, model_names(opened, found, model, tell=tell)
