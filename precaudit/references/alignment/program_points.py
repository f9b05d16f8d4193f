"""The points of a program's entry points, found by running it in FP64 beside its family's textbook (JAX)."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.earlier import Earlier
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import Opened, ProgramRun
from precaudit.references.alignment.fed_tokens import FedTokens
from precaudit.references.alignment.points import Side, Textbook, find_points
from precaudit.references.alignment.points_text import EntryPoints
from precaudit.references.comparison.exact import exact_calls, tap_graph
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.entry_textbooks import goes_on
from precaudit.references.mapped import whole_sequences
from precaudit.references.padding import Padding, possible_padding
from precaudit.references.traced.forward import NotChained
from precaudit.schema.graphs.decoder import CACHES, POINTS, present

MOST = 4096  # rows of a case that are looked at
ENDS = ("resid_out", "final_norm", "logits")


def program_points(
    program: Program, config: DecoderConfig, read_tensor: Callable[[str], Array]
) -> tuple[EntryPoints, ...]:
    """Return what each entry point of a program shows of its family's textbook, by its first case, which is run.

    Raises UserError where the program cannot be traced.
    """
    with tempfile.TemporaryDirectory() as folder:
        opened = trace_program(program.some([next(iter(program.cases))]), Path(folder) / "run")
        return run_points(opened, program, config, read_tensor)


def run_points(
    opened: Opened, program: Program, config: DecoderConfig, read_tensor: Callable[[str], Array]
) -> tuple[EntryPoints, ...]:
    """Return what each entry point that a run holds shows of its family's textbook, by its first case.

    An entry point that goes on where another ended is looked at on the tokens of both. Of one whose inputs hold no
    tokens, or that FP64 does not come through, nothing is told.
    """
    models, found = [Model(c, read_tensor) for c in _as_written(config)], []
    case = opened.record.cases[0]
    entries = traced_entries(opened, program)
    try:
        exact = exact_calls(entries, program, case)
    except (CannotLift, NotImplementedError, NotChained):
        return ()
    before: tuple[OfRun, FedTokens] | None = None
    for of, values in zip(entries, exact, strict=True):
        known = before[1] if before is not None and goes_on(program, before[0], of.program) else None
        best: tuple[EntryPoints, FedTokens] | None = None
        every = (*of.opened.record.points, *of.opened.record.outputs)
        side = Side(values[-1].exact, every, tap_graph(of, [p.name for p in of.opened.record.points])[0])
        for (reading, fed), model in product(_readings(of, case, config, known), models):
            if best is None or not _is_whole(best[0], config):
                points = find_points(side, textbook_values(model, fed))
                one = EntryPoints(of.opened.record.entry, reading.leaf, tuple(points), reading.batch, reading.lengths)
                if points and (best is None or _equal(one) > _equal(best[0])):
                    best = one, fed
        if best is not None:
            found.append(best[0])
        before = (of, best[1]) if best is not None else None
    return tuple(found)


def _as_written(config: DecoderConfig) -> list[DecoderConfig]:
    """Return a configuration, and the same with the factor of the embedding as programs in bfloat16 have it.

    Gemma's √width is rounded before it multiplies (transformers, modeling_gemma3.py): a formula that is 0.1 % off, of
    which values after the first layer are not the exact one's.
    """
    factor = float(np.asarray(config.embed_scale, FORMATS["bfloat16"].dtype))
    return [config] if factor == config.embed_scale else [config, msgspec.structs.replace(config, embed_scale=factor)]


def _is_whole(one: EntryPoints, config: DecoderConfig) -> bool:
    """Whether all that was found is equal in every layer, up to what the last one leaves: no reading finds more."""
    layers = {True: config.layers, False: 1}
    each = [p.equal == layers[POINTS[p.point].per_layer] for p in one.points]
    return all(each) and any(p.point in ENDS for p in one.points)


def _equal(one: EntryPoints) -> int:
    return sum(p.equal for p in one.points)


class Reading(NamedTuple):
    """How inputs are read: the leaf of token ids, whether ids [N] are of N sequences, and what says padding."""

    leaf: int
    batch: bool
    padding: Padding | None

    @property
    def lengths(self) -> int | None:
        """The input that says which rows are padding, as a map names it; None where none does."""
        return self.padding.number if self.padding is not None and self.padding.kind == "rows" else None


def _readings(
    of: OfRun, case: str, config: DecoderConfig, before: FedTokens | None
) -> Iterator[tuple[Reading, FedTokens]]:
    """Yield ways to read which inputs hold token ids and which of their rows are padding, and what was fed by them.

    ``before``: by the entry point before, which this one may go on with, or begin anew.
    """
    record = of.opened.record
    calls: Sequence[Mapping[str, Array]] = [of.opened.tensors(case, c, "inputs") for c in range(record.calls)]
    leaves = [int(n) for n, x in calls[0].items() if x.dtype.kind in "iu" and x.ndim <= 2]
    for leaf in leaves if record.tokens is None else [record.tokens]:
        x = calls[0][str(leaf)]
        for batch in (False, True) if x.ndim == 1 and len(x) > 1 else (False,):
            try:
                ids, rows = whole_sequences(calls, leaf, "align", batch)
            except (UserError, ValueError):
                continue
            if not 0 <= ids.min() <= ids.max() < config.vocab:
                continue
            for said, real in _paddings(record, calls, leaf, (ids, rows)):
                for known in (None, before) if before is not None and len(before.ids) == len(ids) else (None,):
                    fed = _fed(ids, real, rows[-1], known)
                    if max(map(len, fed.ids)) > MOST:
                        continue
                    yield Reading(leaf, batch, said), fed
                    if known is None and any(fed.lead):
                        yield Reading(leaf, batch, said), fed._replace(counted=True)


def _paddings(
    record: ProgramRun, calls: Sequence[Mapping[str, Array]], leaf: int, given: tuple[Array, list[slice]]
) -> Iterator[tuple[Padding | None, Array]]:
    """Yield that no row is padding, and what may say which rows [B, T] of all calls are not; or what the program says.

    What is said of the first call alone, such as how many rows before a sequence's first are padding, is not said of
    later ones.
    """
    ids, rows = given
    if record.lengths is None:
        yield None, np.ones(ids.shape, bool)
        found = [one for one, _ in possible_padding(calls[0], leaf, ids[:, rows[0]])]
    else:
        found = [Padding("rows", record.lengths)]
    for one in found:
        real = np.ones(ids.shape, bool)
        for its, at in zip(calls, rows, strict=True):
            said = one.rows(its, ids[:, at]) if one.kind == "rows" or at.start == 0 else None
            real[:, at] = True if said is None else said
        yield one, real


def _fed(ids: Array, real: Array, last: slice, before: FedTokens | None) -> FedTokens:
    """Return what was fed of token ids [B, T] of which some are no padding; ``last``: the last call's rows."""
    known = [np.zeros(0, ids.dtype)] * len(ids) if before is None else list(before.ids)
    lead = tuple(int(x) for x in real.argmax(axis=1)) if before is None else before.lead
    counted = np.array([len(x) for x in known])[:, None] + np.cumsum(real, axis=1) - 1
    every = tuple(np.concatenate([x, row[r]]) for x, row, r in zip(known, ids, real, strict=True))
    return FedTokens(every, lead, np.where(real, counted, -1)[:, last], before is not None and before.counted)


def textbook_values(model: Model, fed: FedTokens) -> Textbook:
    """Return the textbook's values of a call's rows, positions from 0 on, and what they read."""
    slots, found = fed.slots, dict[tuple[int | None, str], Array]()
    last = max(s.stop for s in slots)

    def hold(i: int, layer: int | None, point: str, shape: tuple[int, ...]) -> Array:
        return found.setdefault((layer, point), np.full((len(slots), *shape), np.nan))[i]

    def emit(i: int, layer: int | None, point: str, x: Array) -> None:
        at, n = fed.at[i], len(fed.ids[i])
        real = at >= 0
        if POINTS[point].over_keys:
            seen = np.where(np.arange(n)[None] <= at[real, None], x[:, at[real], :n], np.nan)
            hold(i, layer, point, (len(x), len(at), last))[:, real, slots[i]] = seen
            return
        hold(i, layer, point, (len(at), *x.shape[1:]))[real] = x[at[real]]
        if point in CACHES:
            hold(i, layer, CACHES[point], (last, *x.shape[1:]))[slots[i]] = x

    wanted = {p for p in present(model.config.sparse) if POINTS[p].by_row or POINTS[p].over_keys}
    earlier = [Earlier(turned=n) for n in fed.turned]
    rows = [np.arange(len(x)) for x in fed.ids]
    forward(model, Sequences(list(fed.ids), earlier=earlier), [FP64], Wanted(wanted, None, rows), emit)
    return Textbook(model, found, fed)
