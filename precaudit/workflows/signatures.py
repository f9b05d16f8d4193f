"""Which keywords each verb takes of which subject, and of which types, for checkers and editors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required

from precaudit.progress import Advance, Progress
from precaudit.recording.programs.program import Program
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import FilterTexts, Texts

if TYPE_CHECKING:
    from precaudit.interpreters.jaxpr.tag import Which
    from precaudit.models.jax_decoder import Parts
    from precaudit.recording.tracing.subject import Subject
    from precaudit.references.formula import OwnReference
    from precaudit.references.names_map import Names
    from precaudit.schema.policies import Policy

Telling = Progress | Advance | bool | None  # where work reports to; True shows a bar
Prompts = Sequence[str] | Sequence[Prompt] | Mapping[str, str] | Path | str | None


class Shared(FilterTexts, total=False):
    """What ``trace`` takes of all."""

    force: bool | None
    resume: bool | None
    command: str | None


class OfProgram(Shared, total=False):
    """What it takes of a Program."""

    taps: "Which | None"
    strict: bool | None
    reference: str | None
    policy: "Policy | str | None"
    settings: Mapping[str, str] | None
    device: str | None
    rename: Path | str | None
    sketch: int | None


class OfModel(Shared, total=False):
    """What it takes of a model."""

    decode_steps: int | None
    batch: int | None
    pad: str | None
    tokens_from: Path | str | None
    forced: Mapping[str, Sequence[int]] | None
    policy: "Policy | str | None"
    settings: Mapping[str, str] | None
    device: str | None
    mesh: str | None
    parts: "Parts | None"
    allow: Sequence[str] | None


class OfSketches(FilterTexts, total=False):
    """What it takes of a model whose tensors are not kept."""

    sketch: Required[int]
    decode_steps: int | None
    policy: "Policy | str | None"
    settings: Mapping[str, str] | None
    device: str | None
    allow: Sequence[str] | None
    force: bool | None
    command: str | None


class LookingAtProgram(FilterTexts, total=False):
    """What ``compare`` and ``diagnose`` take of a Program's run."""

    program: "Program | str | None"
    model: str | None
    accum: Texts | None
    partial: bool | None
    progress: Telling


class ComparingProgram(LookingAtProgram, total=False):
    """What ``compare`` takes beside these."""

    jobs: int | None
    scheduler: str | None
    memory: int | str | None


class Looking(FilterTexts, total=False):
    """What ``compare`` and ``diagnose`` take of a model's run."""

    subject: "Subject | None"
    accum: Texts | None
    formula: bool | None
    model: str | None
    partial: bool | None
    fresh: bool | None
    jobs: int | None
    scheduler: str | None
    memory: int | str | None
    cache: Path | None
    program: "Program | str | None"
    progress: Telling


class Comparing(Looking, total=False):
    """What ``compare`` takes beside these, where a path may be a Program's run."""

    reference: "OwnReference | Names | None"
    policy: "Policy | str | None"


class DiagnoseOptions(Looking, total=False):
    """What ``diagnose`` takes beside these."""

    lift: Any
    objective: str | None
