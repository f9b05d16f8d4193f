"""The points of a program's entry points, found by running it in FP64 beside its family's textbook (JAX)."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.forward import Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.agreement import OfRun
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import Opened
from precaudit.references.alignment.points import Side, Textbook, find_points
from precaudit.references.alignment.points_text import EntryPoints
from precaudit.references.comparison.exact import exact_calls, tap_graph
from precaudit.references.comparison.programs import goes_on, traced_entries
from precaudit.references.mapped import whole_sequences
from precaudit.references.traced.forward import NotChained
from precaudit.schema.graphs.decoder import CACHES, POINTS, present

MOST = 4096  # rows of a case that are looked at


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
    before: tuple[OfRun, Array] | None = None
    for of, values in zip(entries, exact, strict=True):
        known = before[1] if before is not None and goes_on(program, before[0], of.program) else None
        best: tuple[EntryPoints, Array] | None = None
        every = (*of.opened.record.points, *of.opened.record.outputs)
        side = Side(values[-1].exact, every, tap_graph(of, [p.name for p in of.opened.record.points])[0])
        for leaf, ids, rows in _token_inputs(of, case, config, known):
            for model in models:
                points = find_points(side, textbook_values(model, ids, rows))
                one = EntryPoints(of.opened.record.entry, leaf, tuple(points))
                if points and (best is None or _equal(one) > _equal(best[0])):
                    best = one, ids
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


def _equal(one: EntryPoints) -> int:
    return sum(p.equal for p in one.points)


def _token_inputs(
    of: OfRun, case: str, config: DecoderConfig, before: Array | None
) -> Iterator[tuple[int, Array, slice]]:
    """Yield (leaf, ids [B, T] of all rows so far, the last call's rows) of the inputs that may hold token ids.

    ``before``: those of the entry point before, which it may go on with, or begin anew.
    """
    record = of.opened.record
    calls: Sequence[Mapping[str, Array]] = [of.opened.tensors(case, c, "inputs") for c in range(record.calls)]
    leaves = [int(n) for n, x in calls[0].items() if x.dtype.kind in "iu" and x.ndim <= 2]
    for leaf in leaves if record.tokens is None else [record.tokens]:
        try:
            ids, rows = whole_sequences(calls, leaf, "align")
        except (UserError, ValueError):
            continue
        n = rows[-1].stop - rows[-1].start
        goes_on = before is not None and len(before) == len(ids)
        for every in [ids, np.concatenate([before, ids], axis=1)] if goes_on and before is not None else [ids]:
            if every.min() >= 0 and every.max() < config.vocab and every.shape[1] <= MOST:
                yield leaf, every, slice(every.shape[1] - n, every.shape[1])


def textbook_values(model: Model, ids: Array, rows: slice) -> Textbook:
    """Return the textbook's values of some rows of token ids [B, T], positions from 0 on, and what they read."""
    n, batch = ids.shape[1], len(ids)
    at = np.arange(n)[rows]
    found: dict[tuple[int | None, str], Array] = {}

    def hold(i: int, layer: int | None, point: str, x: Array) -> None:
        found.setdefault((layer, point), np.zeros((batch, *x.shape)))[i] = x

    def emit(i: int, layer: int | None, point: str, x: Array) -> None:
        if POINTS[point].over_keys:
            hold(i, layer, point, np.where(np.arange(n)[None] <= at[:, None], x[:, rows, :n], np.nan))
            return
        hold(i, layer, point, x[rows])
        if point in CACHES:
            hold(i, layer, CACHES[point], x)

    wanted = {p for p in present(model.config.sparse) if POINTS[p].by_row or POINTS[p].over_keys}
    forward(model, list(ids), [FP64], Wanted(wanted, None, [np.arange(n)] * batch), emit)
    return Textbook(model, found, at)
