"""The textbook as a program's reference: its parameters under a family's names, its points beside the family's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.models.checkpoints import open_checkpoint, recorded_source
from precaudit.models.checkpoints.names import parse_map, rearrange_axes, with_constants
from precaudit.models.checkpoints.opening import json_table
from precaudit.models.configs import FAMILIES, DecoderConfig, from_config_json, model_tensors
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.references.mapped_tensors import mapped_tensors, parameter_leaves
from precaudit.references.names_map import Input, Names, ProgramNames, SeenPoint
from precaudit.references.sequences import Tokens
from precaudit.references.token_rows import of_sequences, token_rows
from precaudit.schema.graphs.decoder import POINTS, inputs_of, present
from precaudit.schema.policies import announced_policy
from precaudit.schema.toml import toml_bytes


class Pair(NamedTuple):
    """A point of the textbook in a layer, and the program's point, in a step of its scans, that shows it."""

    point: str
    layer: int | None
    shown: ProgramPoint
    step: int | None
    axes: str


class PassedOver(NamedTuple):
    """How many rows before each sequence [B] are padding, and whether calls ``earlier`` than the first held them."""

    lead: tuple[int, ...]
    earlier: bool


@dataclass(frozen=True)
class MappedTextbook:
    """A family's formulas with a program's own parameters; ``pairs`` in the textbook's order.

    ``passed``: padding that the entry point before or after passes over, by case.
    """

    model: Model
    pairs: tuple[Pair, ...]
    names: ProgramNames
    where: str
    passed: Mapping[str, PassedOver] = field(default_factory=dict)

    @property
    def config(self) -> DecoderConfig:
        """The configuration."""
        return self.model.config

    @property
    def tokens(self) -> int:
        """The input that holds token ids."""
        return self.names.tokens or 0

    @property
    def places(self) -> list[tuple[ProgramPoint, int | None]]:
        """The program's points whose formula is held against it, with their steps."""
        return [(p.shown, p.step) for p in self.pairs if not POINTS[p.point].over_keys]

    def values(self, sequences: Sequence[Tokens], rows: int) -> dict[tuple[int | None, str], Array]:
        """Return {(layer, point): FP64 values [B, rows, …]} of every paired point and its inputs; 0 in rows of none."""
        scaling = self.config.rope_scaling
        n = max((1 + s.earlier.turned + int(s.positions[-1]) for s in sequences if len(s.rows)), default=0)
        if scaling is not None and scaling.by_length and n > scaling.original:
            raise UserError(
                f"{n} tokens: RoPE ({scaling.kind}) depends on the length of each call beyond {scaling.original} "
                "positions, and is compared with the reference within them; give shorter cases"
            )
        points = {p.point for p in self.pairs}
        points |= {name for p in points for name in inputs_of(p, self.config.sparse)}
        points = {p for p in points if POINTS[p].by_row}
        found: dict[tuple[int | None, str], Array] = {}

        def emit(i: int, layer: int | None, point: str, values: Array) -> None:
            held = found.setdefault((layer, point), np.zeros((len(sequences), rows, *values.shape[1:])))
            held[i, sequences[i].rows] = values

        every = [np.arange(len(s.rows)) for s in sequences]
        fed = Sequences([s.ids for s in sequences], earlier=[s.earlier for s in sequences])
        forward(self.model, fed, [FP64], Wanted(points, None, every), emit)
        return found


def textbook_of(names: Names, program: Program, opened: Opened) -> MappedTextbook:
    """Return the textbook of a program; raises UserError for what the map or the configuration lacks or has wrong."""
    where = str(names.map)
    given = parse_map(names.map, toml_bytes(names.map), ProgramNames).of(opened.record)
    made = with_constants(_configuration(names.config, names.family), given, where)
    own = mapped_tensors(parameter_leaves(program.params), given, model_tensors(made), where)
    model = Model(made, own if opened.record.origin is None else _original(opened, made))
    points = (*opened.record.points, *opened.record.outputs)
    return MappedTextbook(model, tuple(_pairs(given, points, made, where)), given, where)


def _configuration(path: Path, family: str | None) -> DecoderConfig:
    if family is not None and family not in FAMILIES:
        raise UserError(f"--family {family}: not supported{nearest(family, FAMILIES)}")
    raw = json_table(path, f"{path}: no such file; give the model's config.json with --config")
    said = raw.get("model_type", family)
    if family is not None and said != family:
        raise UserError(f"{path}: model_type = {said!r}, and --family is {family}")
    return from_config_json({**raw, "model_type": said}, str(path))


def _original(opened: Opened, config: DecoderConfig) -> Any:
    """Return what reads a tensor of the checkpoint that the parameters are meant to hold, as the policy has it.

    Raises UserError where it is not there, or lacks a tensor of the configuration.
    """
    origin, announced = opened.record.origin, opened.record.policy
    found = open_checkpoint(recorded_source(origin or ""))
    if missing := [n for n in model_tensors(config) if n not in model_tensors(found.config)]:
        raise UserError(f"{origin}: it holds no {missing[0]!r}, which the names map's configuration has")
    return (found if announced is None else found.under(announced_policy(announced))).tensors.read_tensor


def _pairs(names: ProgramNames, points: tuple[ProgramPoint, ...], config: DecoderConfig, where: str) -> Iterator[Pair]:
    known, own = present(config.sparse), {p.name: p for p in points}
    for name in names.points:
        if name not in known:
            raise UserError(
                f"{where}: [points] {name!r} is no point of the reference implementation{nearest(name, known)}"
            )
    if not names.points:
        raise UserError(f'{where}: [points] is empty; for example q = "query_proj{{#}}" (precaudit points PROGRAM)')
    for layer in (*range(config.layers), None):
        for name in (p for p in known if p in names.points and POINTS[p].per_layer == (layer is not None)):
            entry = names.points[name]
            seen = SeenPoint(entry) if isinstance(entry, str) else entry
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
        x = rearrange_axes(x, pair.axes, f"{where}: [points] {pair.point}")
    if x.size != np.prod(shape):
        raise UserError(
            f"{where}: [points] {pair.point}: {pair.shown.name!r} {list(pair.shown.shape)} is not {list(shape)} "
            "(batch, rows, then the reference's axes); give its axes: { name = …, axes = 'b h t k -> b t h k' }"
        )
    return x.reshape(shape)


def as_cache(pair: Pair, x: Array, batch: int, row: tuple[int, ...], where: str) -> Array:
    """Return a program's cache as [B, S, G, K], a textbook's ``row`` each; raises UserError where it does not fit."""
    x = x.reshape(-1, *pair.shown.shape)[pair.step or 0]
    if pair.axes:
        x = rearrange_axes(x, pair.axes, f"{where}: [points] {pair.point}")
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
        x = rearrange_axes(x, pair.axes, f"{where}: [points] {pair.point}")
    if x.size % int(np.prod(shape)) or (shape[2] > 1 and x.shape[-2:-1] != shape[2:]):
        raise UserError(
            f"{where}: [points] {pair.point}: {pair.shown.name!r} {list(pair.shown.shape)} is not {list(shape)} and "
            "keys (batch, query heads, rows, keys); give its axes: { name = …, axes = 'b t g r s -> b (g r) t s' }"
        )
    return x.reshape(*shape, -1)


def each_its_own(calls: Sequence[Mapping[str, Array]], names: ProgramNames) -> bool:
    """Whether token ids [N] are of N sequences: as the map says, or where an input says N starts."""
    if names.batch is not None or not calls or not isinstance(names.start, Input):
        return bool(names.batch)
    ids, starts = (calls[0].get(str(n)) for n in (names.tokens, names.start.input))
    return ids is not None and starts is not None and of_sequences(ids, starts.size)


def whole_sequences(
    calls: Sequence[Mapping[str, Array]], leaf: int, where: str, each: bool = False
) -> tuple[Array, list[slice]]:
    """Return the token ids [B, T] of all calls one after another, and each call's rows; raises UserError.

    ``each``: ids [N] are of N sequences, one of each, and not N of one.
    """
    found: list[Array] = []
    for held in calls:
        x = held.get(str(leaf))
        if x is None or x.dtype.kind not in "iu" or x.ndim > 2:
            told = "is not there" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise UserError(f"{where}: tokens = {leaf}: that input {told}; token ids are integers: [B, T], [T] or one")
        found.append(token_rows(x, each))
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
