"""The textbook as a program's reference: its parameters under a family's names, its points beside the family's.

A names map (TOML) says both:

    tokens = 0                     # which of a call's inputs (leaves of the tuple, in order) holds token ids [B, T]
    start = 4                      # position of the first row, or of which input [B] says it: { input = 1 }; or found
    lengths = 2                    # which input says how many rows of a call are each sequence's [B], or which [B, T]

    [tensors]                      # by Hugging Face name, {i} the layer; path in the tree of parameters, einops axes
    "model.layers.{i}.self_attn.q_proj.weight" = { path = "layers/{i}/attn/q_proj/w", axes = "d h k -> (h k) d" }

    # "kv/w[0]" is the first of what is stacked along the first axis

    [points]                       # the textbook's point = the program's; {i} the layer, {#} nothing, then #1, #2, …
    q = "query_proj{#}"
    attn_out = { name = "encoded{#}", axes = "b h t k -> b t h k" }
    scores = "scores{#}"           # [batch, query heads, rows, keys], as probs: a key in the slot of its position
    k_cache = "read_k"             # what attention reads of a cache [B, S, G, K], a position in the slot of its number
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.models.checkpoints import open_checkpoint, recorded_source
from precaudit.models.checkpoints.names import Layout, configured, entry_of, layer_axis, parsed, rearranged, turned
from precaudit.models.checkpoints.opening import json_table
from precaudit.models.configs import FAMILIES, DecoderConfig, expected_tensors, from_config_json
from precaudit.models.numpy_decoder.forward import Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.references.sequences import Tokens
from precaudit.schema.graphs.decoder import POINTS, inputs_of, present
from precaudit.schema.policies import announced_policy
from precaudit.schema.toml import toml_bytes

PARTS = 64  # of an array's first axis that a path may name
PART = re.compile(r"(.+)\[(\d+)\]")


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point of the program: its name, and the einops pattern that makes its axes the batch's and the textbook's."""

    name: str
    axes: str = ""


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A leaf of a call's inputs, by its number."""

    input: int


class ProgramNames(Layout, frozen=True, forbid_unknown_fields=True):
    """A names map of a program."""

    tokens: int = 0
    start: int | Input | None = None
    lengths: int | None = None
    points: dict[str, Seen | str] = msgspec.field(default_factory=dict)


class Pair(NamedTuple):
    """A point of the textbook in a layer, and the program's point, in a step of its scans, that shows it."""

    point: str
    layer: int | None
    shown: ProgramPoint
    step: int | None
    axes: str


@dataclass(frozen=True)
class Textbook:
    """A family's formulas with a program's own parameters; ``pairs`` in the textbook's order."""

    model: Model
    pairs: tuple[Pair, ...]
    names: ProgramNames
    where: str

    @property
    def config(self) -> DecoderConfig:
        """The configuration."""
        return self.model.config

    @property
    def places(self) -> list[tuple[ProgramPoint, int | None]]:
        """The program's points whose formula is held against it, with their steps."""
        return [(p.shown, p.step) for p in self.pairs if not POINTS[p.point].keyed]

    def values(self, sequences: Sequence[Tokens], rows: int) -> dict[tuple[int | None, str], Array]:
        """Return {(layer, point): FP64 values [B, rows, …]} of every paired point and its inputs; 0 in rows of none."""
        scaling = self.config.rope_scaling
        n = max((1 + int(s.positions[-1]) for s in sequences if len(s.rows)), default=0)
        if scaling is not None and scaling.by_length and n > scaling.original:
            raise UserError(
                f"{n} tokens: RoPE ({scaling.kind}) depends on the length of each call beyond {scaling.original} "
                "positions, and is held against the textbook within them; give shorter cases"
            )
        points = {p.point for p in self.pairs}
        points |= {name for p in points for name in inputs_of(p, self.config.sparse)}
        points = {p for p in points if POINTS[p].by_row}
        found: dict[tuple[int | None, str], Array] = {}

        def emit(i: int, layer: int | None, point: str, values: Array) -> None:
            held = found.setdefault((layer, point), np.zeros((len(sequences), rows, *values.shape[1:])))
            held[i, sequences[i].rows] = values

        every = [np.arange(len(s.rows)) for s in sequences]
        ids, earlier = [s.ids for s in sequences], [s.earlier for s in sequences]
        forward(self.model, ids, [FP64], Wanted(points, None, every), emit, earlier=earlier)
        return found


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


def textbook_of(names: Names, program: Program, opened: Opened) -> Textbook:
    """Return the textbook of a program; raises UserError for what the map or the configuration lacks or has wrong."""
    where = str(names.map)
    given = parsed(names.map, toml_bytes(names.map), ProgramNames)
    made = configured(_configuration(names.config, names.family), given, where)
    own = _parameters(program.params, given, made, where)
    model = Model(made, own if opened.record.origin is None else _original(opened, made))
    points = (*opened.record.points, *opened.record.outputs)
    return Textbook(model, tuple(_pairs(given, points, made, where)), given, where)


def _configuration(path: Path, family: str | None) -> DecoderConfig:
    if family is not None and family not in FAMILIES:
        raise UserError(f"--family {family}: not supported{nearest(family, FAMILIES)}")
    raw = json_table(path, f"{path}: no such file; give the model's config.json with --config")
    said = raw.get("model_type", family)
    if family is not None and said != family:
        raise UserError(f"{path}: model_type = {said!r}, and --family is {family}")
    return from_config_json({**raw, "model_type": said}, str(path))


def _parameters(params: Any, names: ProgramNames, config: DecoderConfig, where: str) -> Any:
    """Return what reads a tensor by its Hugging Face name; every parameter is a tensor's, or passed over by name."""
    leaves = _leaves(params)
    expected = expected_tensors(config)
    parts = {f"{path}[{n}]" for path, x in leaves.items() for n in range(min(len(x), PARTS) if np.ndim(x) else 0)}
    entries = {name: entry_of(name, names, {path: path for path in (*leaves, *parts)}, where) for name in expected}
    used = {_part(entry.path)[0] for entry, _ in entries.values()}
    below = f"{names.prefix}/" if names.prefix else ""
    passed = tuple(below + path for path in names.ignore)
    for path in leaves:
        if path not in used and not (passed and path.startswith(passed)):
            raise UserError(
                f"{where}: parameter {path!r} is not in the map, so the program may not be that model; if it is, "
                f"ignore = [{path.removeprefix(below)!r}]"
            )

    def read(name: str) -> Array:
        entry, layer = entries[name]
        path, n = _part(entry.path)
        x = np.asarray(leaves[path] if n is None else leaves[path][n])
        at = layer_axis(entry) if entry.axes else None
        if at is not None and at < x.ndim and layer >= x.shape[at]:
            raise UserError(f"{where}: {entry.path!r} {list(x.shape)} has no layer {layer}")
        x = x if at is None else x.take(layer, axis=at)
        return np.ascontiguousarray(turned(entry, x, name) if entry.axes else x)

    for name, shape in expected.items():
        if (found := read(name).shape) != shape:
            raise UserError(
                f"{where}: {name!r} comes out as {list(found)}, expected {list(shape)}; give its axes: "
                f"{{ path = {entries[name][0].path!r}, axes = 'd h k -> (h k) d' }}"
            )
    return read


def _original(opened: Opened, config: DecoderConfig) -> Any:
    """Return what reads a tensor of the checkpoint that the parameters are meant to hold, as the policy has it.

    Raises UserError where it is not there, or lacks a tensor of the configuration.
    """
    origin, announced = opened.record.origin, opened.record.policy
    found = open_checkpoint(recorded_source(origin or ""))
    if missing := [n for n in expected_tensors(config) if n not in expected_tensors(found.config)]:
        raise UserError(f"{origin}: it holds no {missing[0]!r}, which the names map's configuration has")
    return (found if announced is None else found.under(announced_policy(announced))).tensors.read


def _part(path: str) -> tuple[str, int | None]:
    """Return an array's path, and which of its parts along the first axis is meant (``w[1]``); None for all of it."""
    found = PART.fullmatch(path)
    return (path, None) if found is None else (found[1], int(found[2]))


def _leaves(params: Any) -> dict[str, Any]:
    """Return a tree's arrays by their paths; what a variable of NNX calls its value is left out of them."""
    import jax

    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        if len(path) > 1 and getattr(path[-1], "name", None) == "value":
            parts.pop()
        found["/".join(parts)] = x
    return found


def _pairs(names: ProgramNames, points: tuple[ProgramPoint, ...], config: DecoderConfig, where: str) -> Iterator[Pair]:
    known, own = present(config.sparse), {p.name: p for p in points}
    for name in names.points:
        if name not in known:
            raise UserError(f"{where}: [points] {name!r} is no point of the textbook{nearest(name, known)}")
    if not names.points:
        raise UserError(f'{where}: [points] is empty; for example q = "query_proj{{#}}" (precaudit points PROGRAM)')
    for layer in (*range(config.layers), None):
        for name in (p for p in known if p in names.points and POINTS[p].per_layer == (layer is not None)):
            entry = names.points[name]
            seen = Seen(entry) if isinstance(entry, str) else entry
            text = seen.name.replace("{i}", str(layer)).replace("{#}", f"#{layer}" if layer else "")
            if text not in own:
                raise UserError(f"{where}: [points] {name}: the program has no point {text!r}{nearest(text, own)}")
            shown = own[text]
            step = layer if shown.stacked and layer is not None else None
            if step is not None and step >= np.prod(shown.stacked):
                raise UserError(f"{where}: [points] {name}: {text!r} has {list(shown.stacked)} steps, no layer {layer}")
            yield Pair(name, layer, shown, step, seen.axes)


def as_textbook(pair: Pair, x: Array, batch: int, rows: int, row: tuple[int, ...], where: str) -> Array:
    """Return a program's values as [B, T, …], a textbook's ``row`` each; raises UserError where they do not fit."""
    shape = (batch, rows, *row)
    x = x.reshape(-1, *pair.shown.shape)[pair.step or 0]
    if pair.axes:
        x = rearranged(x, pair.axes, f"{where}: [points] {pair.point}")
    if x.size != np.prod(shape):
        raise UserError(
            f"{where}: [points] {pair.point}: {pair.shown.name!r} {list(pair.shown.shape)} is not {list(shape)} "
            "(batch, rows, then the textbook's axes); give its axes: { name = …, axes = 'b h t k -> b t h k' }"
        )
    return x.reshape(shape)


def as_cache(pair: Pair, x: Array, batch: int, row: tuple[int, ...], where: str) -> Array:
    """Return a program's cache as [B, S, G, K], a textbook's ``row`` each; raises UserError where it does not fit."""
    x = x.reshape(-1, *pair.shown.shape)[pair.step or 0]
    if pair.axes:
        x = rearranged(x, pair.axes, f"{where}: [points] {pair.point}")
    if (batch > 1 and len(x) != batch) or x.size % (batch * int(np.prod(row))):
        raise UserError(
            f"{where}: [points] {pair.point}: {pair.shown.name!r} {list(pair.shown.shape)} is not [{batch}, slots, "
            f"{', '.join(map(str, row))}]; give its axes: {{ name = …, axes = 'g b s k -> b s g k' }}"
        )
    return x.reshape(batch, -1, *row)


def as_keyed(pair: Pair, x: Array, shape: tuple[int, int, int], where: str) -> Array:
    """Return a program's scores or probabilities as [B, H, T, S], of ``shape`` and some keys; raises UserError."""
    x = x.reshape(-1, *pair.shown.shape)[pair.step or 0]
    if pair.axes:
        x = rearranged(x, pair.axes, f"{where}: [points] {pair.point}")
    if x.size % int(np.prod(shape)) or (shape[2] > 1 and x.shape[-2:-1] != shape[2:]):
        raise UserError(
            f"{where}: [points] {pair.point}: {pair.shown.name!r} {list(pair.shown.shape)} is not {list(shape)} and "
            "keys (batch, query heads, rows, keys); give its axes: { name = …, axes = 'b t g r s -> b (g r) t s' }"
        )
    return x.reshape(*shape, -1)


def whole_sequences(calls: Sequence[Mapping[str, Array]], leaf: int, where: str) -> tuple[Array, list[slice]]:
    """Return the token ids [B, T] of all calls one after another, and each call's rows; raises UserError."""
    found: list[Array] = []
    for held in calls:
        x = held.get(str(leaf))
        if x is None or x.dtype.kind not in "iu" or x.ndim > 2:
            told = "is not there" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise UserError(f"{where}: tokens = {leaf}: that input {told}; token ids are integers: [B, T], [T] or one")
        found.append(np.atleast_2d(x))
    edges = np.cumsum([0, *(x.shape[1] for x in found)])
    return np.concatenate(found, axis=1), [slice(int(a), int(b)) for a, b in pairwise(edges)]


def starts(first: Mapping[str, Array], names: ProgramNames, batch: int, where: str) -> list[int] | None:
    """Return the positions of sequences' first rows by the first call's inputs; None where the map says none."""
    if names.start is None:
        return None
    if isinstance(names.start, int):
        found = np.full(batch, names.start)
    else:
        x = first.get(str(names.start.input))
        if x is None or x.dtype.kind not in "iu" or x.size not in (1, batch):
            told = "is not there" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise UserError(
                f"{where}: start: input {names.start.input} {told}; positions are integers: [{batch}] or one"
            )
        found = np.broadcast_to(x.reshape(-1), batch)
    if (found < 0).any():
        raise UserError(f"{where}: start: {[int(x) for x in found]}; the first position is 0")
    return [int(x) for x in found]
