"""run.json: what every run says of itself, and what a run says of a dump that was imported."""

from typing import Annotated

import msgspec

from precaudit.schema.records.base import Count, Index, Number, Record

MANIFEST = "run.json"
SCHEMA = 3


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=False, tag_field="kind"):
    """run.json, of any run. ``kind``: what was run: a ``model``, a ``program``, or nothing here, a ``dump``.

    ``device``, ``versions`` (of libraries), ``xla_flags``: what the numbers depend on; a dump does
    not say. ``commit``: of the folder it was run in. ``processes``: the devices that each of several processes held;
    empty of one. ``warnings``: what the run rests on. ``bytes``: of its tensors. ``hashes``: of its other files.
    ``finished`` is null while the run is being written and stays so when it is cut off.
    """

    schema: Annotated[int, msgspec.Meta(ge=1, le=SCHEMA)]
    id: str
    command: str
    device: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    xla_flags: str = ""
    commit: str | None = None
    started: str = ""
    processes: tuple[tuple[Index, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    bytes: Count = 0
    hashes: dict[str, str] = msgspec.field(default_factory=dict)
    finished: str | None = None


class Reported(Record, frozen=True, omit_defaults=False):
    """A number that somebody reported of a place: ``attn_ref_mae`` of a layer, ``gap`` of a prompt."""

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    name: str
    value: Number


class DumpTensor(Record, frozen=True, omit_defaults=False):
    """A tensor: where it belongs, what it is called in its file and was called in the dump, its shape and format."""

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
    file: str
    key: str
    source: str
    shape: tuple[Index, ...]
    dtype: str


class DumpRun(Manifest, frozen=True, kw_only=True, omit_defaults=False, tag="dump"):
    """A dump that was imported from ``source``.

    ``tokens``: ids [T] of a case, where the dump has them; ``left_out``: names of it that no entry takes.
    ``absent``: tensors that others of their point have beside them and the dump lacks.
    """

    source: str
    tensors: tuple[DumpTensor, ...] = ()
    tokens: dict[str, tuple[Index, ...]] = msgspec.field(default_factory=dict)
    reported: tuple[Reported, ...] = ()
    left_out: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
