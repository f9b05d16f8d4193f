"""The verb ``compare``: everything known about one run's errors, written beside it."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

import precaudit
from precaudit.checkpoints import Checkpoint, file_hashes, open_checkpoint
from precaudit.comparison.attribution import attribute
from precaudit.comparison.cache_state import state_errors
from precaudit.comparison.forward import Truth, establish, forward_errors
from precaudit.comparison.local import Emulations, local_errors
from precaudit.comparison.pairs import check_comparable, pair_errors
from precaudit.comparison.prefill_decode import independent_prompts, prefill_decode
from precaudit.comparison.recorded import Recorded
from precaudit.comparison.reference_cache import default_folder
from precaudit.comparison.rows import Place
from precaudit.comparison.weight_rounding import weight_errors
from precaudit.configs import DecoderConfig
from precaudit.coverage import entries
from precaudit.errors import UserError
from precaudit.formats import Array
from precaudit.numpy_decoder.accumulation import parse_accumulation
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.threads import one_blas_thread
from precaudit.points import POINTS
from precaudit.policies import Policy
from precaudit.records import (
    SCHEMA,
    CompareRecord,
    ErrorRecord,
    Look,
    PrefillDecodeRecord,
    number,
    read_layers,
    read_lines,
    value,
    write_lines,
)
from precaudit.selection import Selection, choose_prompts, parse_layers
from precaudit.store import Run, file_hash, open_run

DEFAULT_ACCUM = ("float16", "bfloat16", "float32")
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """What compare found: the records, restricted to what was looked at."""

    run: Run
    errors: list[ErrorRecord]
    prefill_decode: list[PrefillDecodeRecord]
    notes: tuple[str, ...]
    folder: Path
    against: Run | None = None

    def frame(self) -> Any:
        """Return the error records as a pandas DataFrame, nested fields as ``worst.candidate`` and the like."""
        return _frame(self.errors)

    def prefill_decode_frame(self) -> Any:
        """Return the prefill-against-decode records as a pandas DataFrame."""
        return _frame(self.prefill_decode)


def _frame(records: list[Any]) -> Any:
    import pandas

    return pandas.json_normalize([msgspec.to_builtins(r) for r in records])


@dataclass(frozen=True)
class Options:
    """``accum``: formats to emulate sums in; ``model``: where the weights lie now; ``cache``: where references go.

    ``partial``: open a run that was cut off; ``fresh``: compute again what is there.
    """

    accum: tuple[str, ...] = DEFAULT_ACCUM
    model: str | None = None
    partial: bool = False
    cache: Path = field(default_factory=default_folder)
    fresh: bool = False


def compare(
    run: Run | Path | str,
    against: Path | str | None = None,
    select: Selection | None = None,
    options: Options | None = None,
    tell: Tell = lambda done, total, what: None,
) -> Comparison:
    """Compare a recorded run with FP64 and emulations, or (``against``) with another run; write the errors beside it.

    ``select`` filters; None takes all that was recorded. Raises UserError for a run that was altered, weights that
    are not the run's, or a selection outside what was recorded.
    """
    options = options or Options()
    for name in options.accum:
        parse_accumulation(name)
    recorded = Recorded.of(run if isinstance(run, Run) else open_run(run, options.partial))
    look = _look(recorded, select, options)
    if against is not None:
        return _pair(recorded, Recorded.of(open_run(against, options.partial)), look, tell)
    absent = _absent(recorded.run, options)
    look = msgspec.structs.replace(look, weights=not absent)
    verify(recorded, look, tell)
    kept = None if options.fresh else _reuse(recorded.run, look)
    if kept is None:
        checkpoint = None if absent else _checkpoint(recorded.run, options)
        with one_blas_thread():
            kept = _compute(recorded, look, checkpoint, absent, options, tell)
    errors, pairs, notes = kept
    return Comparison(
        recorded.run, _visible(errors, look), [p for p in pairs if p.prompt in look.prompts], notes, recorded.run.folder
    )


def recall(run: Path | str) -> Comparison:
    """Return everything compare has written about a run; raises UserError when there is nothing, or of another run."""
    opened = open_run(run, partial=True)
    before = _before(opened)
    if before is None:
        raise UserError(f"{opened.folder}: not compared yet, or changed since; run: precaudit compare {opened.folder}")
    errors = read_lines(opened.folder / "errors.jsonl", ErrorRecord)
    pairs = read_lines(opened.folder / "prefill_decode.jsonl", PrefillDecodeRecord)
    return Comparison(opened, errors, pairs, before.notes, opened.folder)


def _look(recorded: Recorded, select: Selection | None, options: Options) -> Look:
    """Resolve a selection against what was recorded."""
    asked = recorded.requested
    select = select or Selection(points=asked.points, phases=asked.phases)
    n = recorded.run.record.model.config["layers"]
    layers = asked.layers if select.layers is None else parse_layers(select.layers, n)
    outside = [i for i in layers if i not in asked.layers]
    if outside:
        raise UserError(
            f"layer {outside[0]} was not recorded in {recorded.run.folder}; recorded: {_spans(asked.layers)}"
        )
    known = {*asked.points, *asked.support}
    for point in select.points:
        if point not in known:
            recorded_points = ", ".join(p for p in POINTS if p in known)
            raise UserError(f"point {point!r} was not recorded in {recorded.run.folder}; recorded: {recorded_points}")
    phases = tuple(p for p in select.phases if p in asked.phases)
    if not phases:
        raise UserError(f"none of the phases {', '.join(select.phases)} was recorded in {recorded.run.folder}")
    prompts = choose_prompts(select.prompts, list(recorded.run.prompts))
    accum = tuple(_accum_name(a) for a in options.accum)
    return Look(prompts=prompts, phases=phases, points=select.points, layers=layers, accum=accum, weights=True)


def _accum_name(text: str) -> str:
    name, block = parse_accumulation(text)
    return name if block == 1 else f"{name}/{block}"


def _spans(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers == tuple(range(layers[0], layers[-1] + 1)) else str(list(layers))


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
        hashes = file_hashes(options.model or record.model.reference)
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
    opened = open_checkpoint(options.model or run.record.model.reference)
    return opened.with_weights(run.record.policy["weights"])


def _identity(run: Run) -> str:
    return file_hash(run.folder / "run.json")


def _reuse(run: Run, look: Look) -> tuple[list[ErrorRecord], list[PrefillDecodeRecord], tuple[str, ...]] | None:
    """Return what an earlier compare of this very run wrote, when it covers ``look``."""
    before = _before(run)
    if before is None or not any(covers(old, look) for old in before.looks):
        return None
    errors = read_layers(run.folder / "errors.jsonl", look.layers)
    return errors, read_lines(run.folder / "prefill_decode.jsonl", PrefillDecodeRecord), before.notes


def _before(run: Run) -> CompareRecord | None:
    path = run.folder / "compare.json"
    try:
        before = msgspec.json.decode(path.read_bytes(), type=CompareRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    names = ("errors.jsonl", "prefill_decode.jsonl")
    current = (SCHEMA, precaudit.__version__, _identity(run))
    if (before.schema, before.precaudit, before.run) != current or not all((run.folder / n).is_file() for n in names):
        return None
    return before if all(before.hashes.get(n) == file_hash(run.folder / n) for n in names) else None


def covers(old: Look, new: Look) -> bool:
    """Whether everything in ``new`` is in ``old``."""
    fields = ("prompts", "phases", "points", "layers", "accum")
    return old.weights >= new.weights and all(set(getattr(new, f)) <= set(getattr(old, f)) for f in fields)


def _visible(errors: list[ErrorRecord], look: Look) -> list[ErrorRecord]:
    """Return the records a look asks for."""
    prompts, phases, points, layers = set(look.prompts), set(look.phases), set(look.points), set(look.layers)
    accums = {f"accum:{a}" for a in look.accum}
    found = []
    for e in errors:
        if e.layer is not None and e.layer not in layers:
            continue
        if e.kind == "weights":
            found.append(e)
        elif e.kind == "accum" and e.candidate not in accums:
            continue
        elif e.prompt in prompts and e.phase in phases and (e.point in points or e.kind == "state"):
            found.append(e)
    return found


def _compute(
    recorded: Recorded, look: Look, checkpoint: Checkpoint | None, absent: str, options: Options, tell: Tell
) -> tuple[list[ErrorRecord], list[PrefillDecodeRecord], tuple[str, ...]]:
    run = recorded.run
    policy = Policy(**{f.name: run.record.policy[f.name] for f in fields(Policy)})
    config = msgspec.convert(run.record.model.config, DecoderConfig)
    model = Model(config, checkpoint.tensors.read if checkpoint is not None else _no_weights)
    truth, problem = None, "weights"
    if checkpoint is not None:
        identity = f"{run.record.model.sha256}:{policy.weights}"
        points = tuple(p for p in look.points if not POINTS[p].state)
        truth = establish(recorded, model, identity, policy, look.prompts, points, look.layers, options.cache, tell)
    emulations = Emulations(policy, look.accum)
    errors = list(_missing(recorded, look))
    errors += _per_layer(recorded, model, truth, problem, emulations, look, tell)
    if checkpoint is not None:
        errors += weight_errors(checkpoint, look.layers)
    pairs = list(prefill_decode(recorded, look.prompts, truth))
    notes = tuple(_notes(recorded, look, truth, errors, absent))
    return _keep(run, look, errors, pairs, notes, truth)


def _no_weights(name: str) -> Array:
    raise AssertionError(f"{name} was asked for without weights")


def _missing(recorded: Recorded, look: Look) -> Iterator[ErrorRecord]:
    """Yield an unknown record for every requested tensor that is not in the run."""
    for prompt in look.prompts:
        for e in entries(recorded.requested, len(recorded.run.prompts[prompt].tokens)):
            wanted = e.phase in look.phases and e.point in look.points and (e.layer is None or e.layer in look.layers)
            if wanted and (prompt, *e.key) not in recorded.index:
                place = Place(prompt, e.phase, e.step, e.layer, e.point)
                why = recorded.misfits.get((prompt, *e.key), "requested, not in the run")
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
                if phase == "decode" and layer is not None:
                    for cache in caches:
                        yield from state_errors(recorded, Place(prompt, phase, 0, layer, cache))
        tell(i + 1, len(groups), "local errors and emulations")


def _forward(recorded: Recorded, truth: Truth | None, problem: str, place: Place) -> Iterator[ErrorRecord]:
    if truth is not None:
        yield from forward_errors(recorded, truth, place)
        return
    for step in recorded.steps(place.phase):
        here = replace(place, step=step)
        if (here.prompt, here.phase, step, here.layer, here.point) in recorded.index:
            yield here.record("forward", recorded.run.record.id, "fp64", unknown=problem)


def _keep(
    run: Run,
    look: Look,
    errors: list[ErrorRecord],
    pairs: list[PrefillDecodeRecord],
    notes: tuple[str, ...],
    truth: Truth | None,
) -> tuple[list[ErrorRecord], list[PrefillDecodeRecord], tuple[str, ...]]:
    """Write the files, together with rows of earlier looks that this one did not make again."""
    before = _before(run)
    looks: tuple[Look, ...] = (look,)
    if before is not None:
        made = {_key(e) for e in errors}
        errors = [e for e in read_lines(run.folder / "errors.jsonl", ErrorRecord) if _key(e) not in made] + errors
        fresh = {p.prompt for p in pairs}
        old = read_lines(run.folder / "prefill_decode.jsonl", PrefillDecodeRecord)
        pairs = [p for p in old if p.prompt not in fresh] + pairs
        # rows of this look replace an older look's, which stays complete only where it knew no more than this one
        kept = [x for x in before.looks if x.weights <= look.weights and set(x.accum) <= set(look.accum)]
        others = [x for x in kept if not covers(look, x)]
        looks = (*others, look)
        notes = tuple(dict.fromkeys((*notes, *(before.notes if others else ()))))
    write_lines(run.folder / "errors.jsonl", errors)
    write_lines(run.folder / "prefill_decode.jsonl", pairs)
    hashes = {n: file_hash(run.folder / n) for n in ("errors.jsonl", "prefill_decode.jsonl")}
    sigma = number(truth.sigma) if truth is not None else None
    record = CompareRecord(
        schema=SCHEMA, precaudit=precaudit.__version__, run=_identity(run), looks=looks, sigma=sigma, notes=notes,
        hashes=hashes,
    )  # fmt: skip
    write_lines(run.folder / "compare.json", [record])
    return errors, pairs, notes


def _key(e: ErrorRecord) -> tuple[Any, ...]:
    return (e.prompt, e.phase, e.step, e.layer, e.point, e.kind, e.candidate)


def _notes(
    recorded: Recorded, look: Look, truth: Truth | None, errors: list[ErrorRecord], absent: str
) -> Iterator[str]:
    if absent:
        yield f"no weights: {absent}; only what needs none was computed (--model PATH gives them)"
    yield from recorded.run.record.warnings
    for n in recorded.run.record.neutrality:
        if not n.bitwise:
            size = value(n.max_diff)
            yield f"capturing changed the {n.phase} logits by up to {size:.3g}: the audit disturbs the program"
    for a, b in independent_prompts(recorded, look.prompts, truth):
        yield f"decode does not depend on the prompt: {a} and {b} have the same decode logits, different tokens"
    differing = [e for e in errors if e.kind == "state" and e.mismatched]
    if differing:
        first = differing[0]
        yield (
            f"state: {len(differing)} caches differ from the rows that were written; first layer {first.layer} "
            f"{first.point}, prompt {first.prompt}, step {first.step}, {first.mismatched} elements"
        )
    bad = [e for e in errors if e.nonfinite]
    if bad:
        yield f"{len(bad)} records hold NaN or infinities; first: layer {bad[0].layer} {bad[0].point}, {bad[0].kind}"


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
    folder = a.run.folder / "against" / hashlib.sha256(_identity(b.run).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "errors.jsonl", errors)
    return Comparison(a.run, errors, [], notes, folder, b.run)


def first_unexplained(errors: list[ErrorRecord]) -> ErrorRecord | None:
    """Return the first record, by layer and then point order, whose local error rounding does not account for."""
    order = {name: i for i, name in enumerate(POINTS)}
    found = []
    for e in errors:
        a = attribute(e)
        if a is not None and a.unexplained:
            found.append(e)
    last = 1 << 30
    return min(found, key=lambda e: (last if e.layer is None else e.layer, order[e.point]), default=None)
