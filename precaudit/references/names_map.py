"""A names map (TOML): under which names a program has a family's tensors and points.

tokens = 0                     # which of a call's inputs (leaves of the tuple, in order) holds token ids [B, T]
batch = true                   # ids [N] are of N sequences, one of each, and not N of one
start = 4                      # position of the first row, or of which input [B] says it: { input = 1 }; or found
lengths = 2                    # which input says how many rows of a call are each sequence's [B], or which [B, T]

[tensors]                      # by Hugging Face name, {i} the layer; path in the tree of parameters, einops axes
"model.layers.{i}.self_attn.q_proj.weight" = { path = "layers/{i}/attn/q_proj/w", axes = "d h k -> (h k) d" }

# "kv/w[0]" is the first of what is stacked along the first axis, "qkv[:, 0:64]" and "gate_up[0::2]" are blocks
# "model.layers.3.…" is of one layer; sizes = { h = 4 }: of axes in brackets
# path = ["embed/0", "embed/1"]: rows of several arrays, one after another; their columns where columns says which
# rows = "0:64, 192:256": which rows of what axes give are the tensor's, in its order; columns: of its columns
# times = 0.5, plus = -1.0: the tensor is what is stored, times 0.5, less 1

[points]                       # the textbook's point = the program's; {i} the layer, {#} nothing, then #1, #2, …
q = "query_proj{#}"
attn_out = { name = "encoded{#}", axes = "b h t k -> b t h k" }
scores = "scores{#}"           # [batch, query heads, rows, keys], as probs: a key in the slot of its position
k_cache = "read_k"             # what attention reads of a cache [B, S, G, K], a position in the slot of its number

[entries.decode]               # what is otherwise in an entry point: tokens, batch, start, lengths, and points
points.k_cache = "read_k"
points.mlp_act = false         # shown in the others alone
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from precaudit.errors import UserError, nearest
from precaudit.models.checkpoints.names import Layout, parse_map
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import ProgramRun
from precaudit.schema.toml import toml_bytes


class SeenPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point of the program: its name, and the einops pattern that makes its axes the batch's and the textbook's."""

    name: str
    axes: str = ""


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A leaf of a call's inputs, by its number."""

    input: int


class EntryNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a names map says of one entry point; None: as of all. A point that is false is not shown there."""

    tokens: int | None = None
    start: int | Input | None = None
    lengths: int | None = None
    batch: bool | None = None
    points: dict[str, SeenPoint | str | Literal[False]] = msgspec.field(default_factory=dict)


class ProgramNames(Layout, frozen=True, forbid_unknown_fields=True):
    """A names map of a program; ``tokens``, ``start``: as the program says where the map does not."""

    tokens: int | None = None
    start: int | Input | None = None
    lengths: int | None = None
    batch: bool | None = None
    points: dict[str, SeenPoint | str] = msgspec.field(default_factory=dict)
    entries: dict[str, EntryNames] = msgspec.field(default_factory=dict)

    def of(self, record: ProgramRun) -> "ProgramNames":
        """Return what it says of an entry point that a run holds; of no input that holds tokens the first is taken."""
        own = self.entries.get(record.entry, EntryNames())
        points = {name: seen for name, seen in {**self.points, **own.points}.items() if seen is not False}
        start = Input(record.start) if record.start is not None else None
        found = {
            "tokens": _first(own.tokens, self.tokens, record.tokens, 0),
            "start": _first(own.start, self.start, start),
            "lengths": _first(own.lengths, self.lengths, record.lengths),
            "batch": _first(own.batch, self.batch),
        }
        return msgspec.structs.replace(self, points=points, entries={}, **found)


def _first(*given: Any) -> Any:
    return next((x for x in given if x is not None), None)


@dataclass(frozen=True)
class Names:
    """The textbook by its files: a names map, a config.json, and the family where that does not say it."""

    map: Path
    config: Path
    family: str | None = None

    def record(self) -> dict[str, str]:
        """Return it as text, with the hashes of both files."""
        family = {} if self.family is None else {"family": self.family}
        files = {"map": self.map, "config": self.config}
        hashes = {f"{name} sha256": file_hash(path) for name, path in files.items()}
        return {name: str(path.resolve()) for name, path in files.items()} | hashes | family

    @classmethod
    def of(cls, record: Mapping[str, str]) -> "Names":
        """Return what ``record`` wrote; raises UserError where a file is gone or was altered since."""
        found = cls(Path(record["map"]), Path(record["config"]), record.get("family"))
        for name in ("map", "config"):
            path = Path(record[name])
            if not path.is_file() or file_hash(path) != record.get(f"{name} sha256"):
                raise UserError(f"{path} is not what compare read (gone, or its hash differs); compare again")
        return found


def names_of(map: Path | None, config: Path | None, family: str | None) -> Names | None:
    """Return the textbook by a names map; its config.json is by default beside it. Raises UserError without a map."""
    if map is None:
        if config is not None or family is not None:
            raise UserError("config and family belong to a names map: --map FILE")
        return None
    if not map.is_file():
        raise UserError(f"{map}: no such file; a names map says whose tensors a program's parameters are (--map FILE)")
    beside = map.with_suffix(".json")
    return Names(map, config or (beside if beside.is_file() else map.parent / "config.json"), family)


def check_entries(names: Names, known: Sequence[str]) -> None:
    """Raise UserError where a names map speaks of an entry point that the program does not have."""
    given = parse_map(names.map, toml_bytes(names.map), ProgramNames)
    if unknown := [name for name in given.entries if name not in known]:
        raise UserError(f"{names.map}: entries.{unknown[0]}: no entry point of the program{nearest(unknown[0], known)}")
