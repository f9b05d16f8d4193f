"""The verb ``compare``: everything known about one run's errors, written beside it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from precaudit.arrays import Array
from precaudit.caching import cache_folder
from precaudit.checkpoints import Checkpoint, file_hashes, open_checkpoint, recorded_source
from precaudit.comparison.cache_state import state_errors
from precaudit.comparison.formula import formula_errors, recorded_program
from precaudit.comparison.forward import Tell, Truth, emulate, establish, forward_errors
from precaudit.comparison.handover import POINT, handover_errors
from precaudit.comparison.local import Emulations, local_errors
from precaudit.comparison.looks import Found, covers, keep, resolve, reuse, visible
from precaudit.comparison.notes import notes_on
from precaudit.comparison.pairs import check_comparable, pair_errors
from precaudit.comparison.prefill_decode import prefill_decode
from precaudit.comparison.recorded import Recorded
from precaudit.comparison.weight_rounding import weight_errors
from precaudit.comparison.written import Comparison, written
from precaudit.configs import DecoderConfig
from precaudit.coverage import entries, formula_keys
from precaudit.errors import UserError
from precaudit.graphs.decoder import LOGITS, POINTS
from precaudit.numpy_decoder.accumulation import parse_accumulation
from precaudit.numpy_decoder.honest import honest_forms
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.threads import one_blas_thread
from precaudit.places import Place
from precaudit.policies import recorded_policy
from precaudit.records import (
    ErrorRecord,
    Look,
    number,
    write_lines,
)
from precaudit.selection import Selection
from precaudit.store import Run, file_hash, open_run

DEFAULT_ACCUM = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Options:
    """``accum``: formats to emulate sums in; ``model``: where the weights lie now; ``cache``: where references go.

    ``partial``: open a run that was cut off; ``fresh``: compute again what is there; ``formula``: compare the program's
    FP64 shadow with the reference too (needs JAX).
    """

    accum: tuple[str, ...] = DEFAULT_ACCUM
    model: str | None = None
    partial: bool = False
    cache: Path = field(default_factory=lambda: cache_folder("references"))
    fresh: bool = False
    formula: bool = False


@np.errstate(all="ignore")  # what is not finite has its own status
def compare(
    run: Run | Path | str,
    against: Path | str | None = None,
    select: Selection | None = None,
    options: Options | None = None,
    tell: Tell = lambda done, total, what: None,
    subject: Any = None,
) -> Comparison:
    """Compare a recorded run with FP64 and emulations, or (``against``) with another run; write the errors beside it.

    ``select`` filters; None takes all that was recorded. ``subject``: the program that was recorded, for its formula,
    where it is not the shipped decoder. Raises UserError for a run that was altered, weights that
    are not the run's, or a selection outside what was recorded.
    """
    options = options or Options()
    for name in options.accum:
        parse_accumulation(name)
    recorded = Recorded.of(run if isinstance(run, Run) else open_run(run, options.partial))
    look = resolve(recorded, select, options.accum)
    if against is not None:
        return _pair(recorded, Recorded.of(open_run(against, options.partial)), look, tell)
    absent = _absent(recorded.run, options)
    look = msgspec.structs.replace(look, weights=not absent, formula=options.formula)
    verify(recorded, look, tell)
    kept = None if options.fresh else reuse(recorded.run, look)
    if kept is None:
        checkpoint = None if absent else _checkpoint(recorded.run, options)
        with one_blas_thread():
            if look.formula:
                kept = _added(recorded, look, checkpoint, absent, options, tell, subject)
            else:
                kept = _compute(recorded, look, checkpoint, absent, options, tell)
    errors, pairs, notes = kept
    return Comparison(
        recorded.run, visible(errors, look), [p for p in pairs if p.prompt in look.prompts], notes, recorded.run.folder,
        formula=look.prompts if look.formula else (),
    )  # fmt: skip


def verify(recorded: Recorded, look: Look, tell: Tell) -> None:
    """Read every tensor the look needs, so that an altered one is noticed even where rows are reused."""
    chosen = [
        p for p in recorded.run.points if p.prompt in look.prompts and (p.layer is None or p.layer in look.layers)
    ]
    for i, point in enumerate(chosen):
        recorded.run.tensor(point)
        if i % 500 == 0:
            tell(i, len(chosen), "checking hashes")


def _absent(run: Run, options: Options) -> str:
    """Return why the run's weights are not at hand, or nothing when they are.

    Raises UserError when other weights are where its should be, or where --model says.
    """
    record = run.record
    try:
        hashes = file_hashes(options.model or recorded_source(record.model.reference))
    except UserError as error:
        if options.model is not None:
            raise
        return str(error)
    found = hashes.sha256()
    if found != record.model.sha256:
        raise UserError(
            f"{hashes.paths[0]}: the weights are not those of this run (SHA-256 {found[:12]}…, the run has "
            f"{record.model.sha256[:12]}…); give the right ones with --model PATH"
        )
    return ""


def _checkpoint(run: Run, options: Options) -> Checkpoint:
    opened = open_checkpoint(options.model or recorded_source(run.record.model.reference), run.record.model.allowed)
    return opened.with_weights(run.record.policy["weights"])


def _compute(
    recorded: Recorded, look: Look, checkpoint: Checkpoint | None, absent: str, options: Options, tell: Tell
) -> Found:
    run = recorded.run
    policy = recorded_policy(run.record)
    config = msgspec.convert(run.record.model.config, DecoderConfig)
    model = Model(config, checkpoint.tensors.read if checkpoint is not None else _no_weights)
    truth, problem = None, "weights"
    if checkpoint is not None:
        identity = f"{run.record.model.sha256}:{policy.weights}"
        truth = establish(recorded, model, identity, policy, look, options.cache, tell)
    emulations = Emulations(policy, look.accum)
    errors = list(_missing(recorded, look))
    errors += _per_layer(recorded, model, truth, problem, emulations, look, tell)
    if truth is not None and (dot := _summed(errors)) is not None:
        emulate(truth, model, recorded, policy, dot, tell)
        errors = [e for e in errors if e.kind != "forward"] + list(_forwards(recorded, truth, look))
    if checkpoint is not None:
        errors += weight_errors(checkpoint, look.layers)
    pairs = list(prefill_decode(recorded, look.prompts, truth))
    notes = (*notes_on(recorded, look, truth, errors, absent), *(truth.said if truth is not None else ()))
    return keep(run, look, Found(errors, pairs, notes), None if truth is None else number(truth.sigma))


def _added(
    recorded: Recorded,
    look: Look,
    checkpoint: Checkpoint | None,
    absent: str,
    options: Options,
    tell: Tell,
    subject: Any,
) -> Found:
    """Add formula records to what a look holds beside them, which is computed where no earlier look wrote it."""
    run, without = recorded.run, msgspec.structs.replace(look, formula=False)
    if options.fresh or reuse(run, without) is None:
        _compute(recorded, without, checkpoint, absent, options, tell)
    held = written(run)
    assert held is not None
    started = perf_counter()
    tell(0, 1, "FP64 shadow")
    if checkpoint is None:
        keys = list(formula_keys(recorded.requested, recorded.config, look.phases))
        places = [Place(prompt, *key) for prompt in look.prompts for key in keys]
        made = [p.record("formula", "shadow", "fp64", unknown="weights") for p in places]
    else:
        model = Model(recorded.config, checkpoint.tensors.read)
        program = recorded_program(recorded, subject, options.model)
        made = list(formula_errors(recorded, model, look.prompts, program, look.phases))
    n = len(look.prompts)
    note = f"formula: the FP64 shadow of {n} prompt{'s' if n > 1 else ''} took {perf_counter() - started:.1f} s"
    base = next(x for x in held.looks if covers(x, without))
    grown = msgspec.structs.replace(look, accum=base.accum)
    kept = keep(run, grown, Found(made, [], (*held.notes, note)), held.sigma)
    return Found(kept.errors, kept.pairs, kept.notes)


def _no_weights(name: str) -> Array:
    raise AssertionError(f"{name} was asked for without weights")


def _missing(recorded: Recorded, look: Look) -> Iterator[ErrorRecord]:
    """Yield an unknown record for every requested tensor that is not in the run."""
    for prompt in look.prompts:
        for e in entries(recorded.requested, len(recorded.run.prompts[prompt].tokens)):
            wanted = e.phase in look.phases and e.point in look.points and (e.layer is None or e.layer in look.layers)
            place = Place(prompt, *e.key)
            if wanted and place not in (recorded.hashed if e.hashed else recorded.index):
                why = recorded.misfits.get(place, "requested, not in the run")
                yield place.record("local", recorded.run.record.id, "fp64", missing=why)


def _per_layer(
    recorded: Recorded, model: Model, truth: Truth | None, problem: str, emulations: Emulations, look: Look, tell: Tell
) -> Iterator[ErrorRecord]:
    """Yield local, accum, state and forward records, one layer's tensors in memory at a time."""
    caches = [p for p in POINTS if POINTS[p].state and p in {*recorded.requested.points, *recorded.requested.support}]
    groups: list[int | None] = [*look.layers, None]
    for i, layer in enumerate(groups):
        if layer is not None and truth is not None:
            model.warm(layer)
        for prompt in look.prompts:
            for phase in look.phases:
                for point in look.points:
                    if POINTS[point].per_layer == (layer is not None) and not POINTS[point].state:
                        place = Place(prompt, phase, 0, layer, point)
                        yield from local_errors(recorded, model, truth is not None, emulations, place)
                        yield from _forward(recorded, truth, problem, place)
                if layer is not None and POINT in look.points:
                    place = Place(prompt, phase, 0, layer, POINT)
                    yield from handover_errors(recorded, model, truth is not None, place)
                if phase == "decode" and layer is not None:
                    for cache in caches:
                        yield from state_errors(recorded, Place(prompt, phase, 0, layer, cache))
        tell(i + 1, len(groups), "local errors and emulations")


def _summed(errors: list[ErrorRecord]) -> Callable[[Array, Array], Array] | None:
    """Return the sums of another honest form by which local records close, the one of most; None without any."""
    dots = {f.name: f.dot for f in honest_forms(POINTS[LOGITS], "float32") if f.dot is not None}
    used = Counter(name for e in errors for names in (e.elided or {}).values() for name in names if name in dots)
    return dots[used.most_common(1)[0][0]] if used else None


def _forwards(recorded: Recorded, truth: Truth, look: Look) -> Iterator[ErrorRecord]:
    """Yield the forward records of a look."""
    for layer, prompt, phase, point in product((*look.layers, None), look.prompts, look.phases, look.points):
        if POINTS[point].per_layer == (layer is not None) and not POINTS[point].state:
            yield from forward_errors(recorded, truth, Place(prompt, phase, 0, layer, point))


def _forward(recorded: Recorded, truth: Truth | None, problem: str, place: Place) -> Iterator[ErrorRecord]:
    if truth is not None:
        yield from forward_errors(recorded, truth, place)
        return
    for step in recorded.steps(place.phase):
        here = place._replace(step=step)
        if here in recorded.index:
            yield here.record("forward", recorded.run.record.id, "fp64", unknown=problem)


def _pair(a: Recorded, b: Recorded, look: Look, tell: Tell) -> Comparison:
    """Compare run A (candidate) with run B; files go to A/against/<B>/."""
    prompts = tuple(p for p in look.prompts if p in b.run.prompts)
    notes = tuple(check_comparable(a, b, look.prompts))
    verify(a, look, tell)
    errors: list[ErrorRecord] = []
    for layer in [*look.layers, None]:
        for prompt in prompts:
            for phase in look.phases:
                for point in look.points:
                    if POINTS[point].per_layer == (layer is not None):
                        errors += pair_errors(a, b, Place(prompt, phase, 0, layer, point))
    folder = a.run.folder / "against" / hashlib.sha256(file_hash(b.run.folder / "run.json").encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "errors.jsonl", errors)
    return Comparison(a.run, errors, [], notes, folder, b.run)
