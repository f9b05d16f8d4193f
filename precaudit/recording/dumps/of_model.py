"""A dump as a run of a model: once it is known whose weights made it, it is compared and judged like any run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np

from precaudit.errors import UserError
from precaudit.mirrors import by_url
from precaudit.models.checkpoints import Checkpoint
from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance, silent
from precaudit.recording.dumps.formats import in_policy_format, narrowest_formats, policy_of_formats
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.point_lines import Tensor, point_record
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.runs.step_rows import LogitsCall, step_records
from precaudit.schema.coverage import has_inputs, point_format
from precaudit.schema.graphs.decoder import LOGITS, POINTS, present, shape_of
from precaudit.schema.places import Place, spans
from precaudit.schema.policies import PRESETS, Policy
from precaudit.schema.records.lines import write_lines
from precaudit.schema.records.manifests import SCHEMA, DumpTensor
from precaudit.schema.records.runs import ModelRecord, PointRecord, PromptRecord, Requested, RunRecord, StepRecord

PHASES = ("prefill", "decode")
NAMED = 5  # that a note lists


@dataclass(frozen=True)
class JudgedDump:
    """What of a dump can be judged as a run of a model: its tensors by place, and how many tokens each prompt has.

    ``left``: what cannot, in sentences.
    """

    dump: Imported
    config: DecoderConfig
    places: dict[Place, DumpTensor]
    lengths: dict[str, int]
    left: tuple[str, ...]

    def positions(self, place: Place) -> tuple[int, ...]:
        """Return the positions of a tensor's rows: all of a prompt's, or what a decode step was fed."""
        n, rows = self.lengths[place.prompt], self.places[place].shape[POINTS[place.point].axes.index("T")]
        first = n - 1 + place.step if place.phase == "decode" else n - 1 if _last_alone(place, rows) else 0
        return tuple(range(first, first + rows))

    def requested(self) -> Requested:
        """Return what the dump holds, as what a run was asked for."""
        calls: dict[str, set[str]] = {}
        for p in self.places:
            calls.setdefault(f"{p.phase} {p.step}", set()).add(p.point)
        held = {p.point for p in self.places}
        return Requested(
            prompts=tuple(dict.fromkeys(t.prompt for t in self.dump.record.tensors)),
            layers=tuple(sorted({p.layer for p in self.places if p.layer is not None})),
            points=tuple(name for name in POINTS if name in held),
            support=(),
            phases=tuple(x for x in PHASES if any(p.phase == x for p in self.places)),
            positions=None,
            every_logit=any(len(self.positions(p)) > 1 for p in self.places if p.point == LOGITS),
            decode_steps=max((p.step for p in self.places), default=0),
            batch=1,
            pad="right",
            tokens_from=None,
            calls={call: tuple(name for name in POINTS if name in calls[call]) for call in sorted(calls)},
        )


def write_as_run(
    dump: Imported, checkpoint: Checkpoint, reference: str, policy: Policy | None, tell: Advance = silent
) -> Run:
    """Write a run's manifest and lines beside a dump, as a run of ``checkpoint``; return it opened.

    ``reference``: what the user named the model by. ``policy``: what the other framework computes in; None: read from
    the formats of its numbers. Numbers that a wider format was written in are held in the policy's where that holds
    them exactly. Raises UserError where the dump has no tokens, is of other sizes, or tells no policy.
    """
    held = _judged(dump, checkpoint.config)
    said = []
    if policy is None:
        formats = narrowest_formats((p.point, dump.tensor(t)) for p, t in held.places.items())
        policy = policy_of_formats(formats)
        policy = policy if checkpoint.rounds_factor else replace(policy, embed_factor="exact")
        said.append(f"policy {policy.name}, as the formats of the dump's numbers are; --policy says another")
    asked = held.requested()
    said += [*held.left, *_unknown_locals(asked, checkpoint.config)]
    folder = dump.folder
    write_manifest(folder, dump.record)  # what is cut off here is no run of a model
    points = list(_point_records(held, policy, tell))
    write_lines(folder / "points.jsonl", points)
    write_lines(folder / "steps.jsonl", _steps(held))
    write_lines(folder / "prompts.jsonl", _prompts(held))
    hashes = {name: file_hash(folder / name) for name in ("points.jsonl", "steps.jsonl", "prompts.jsonl")}
    model = ModelRecord(
        id=checkpoint.name,
        reference=by_url(reference),
        sha256=checkpoint.hashes.sha256(),
        config=msgspec.to_builtins(checkpoint.config),
        allowed=checkpoint.allowed,
    )
    record = RunRecord(
        schema=SCHEMA,
        id=dump.record.id,
        model=model,
        policy=asdict(policy),
        requested=asked,
        device=_arithmetic(policy),
        command=dump.record.command,
        started=dump.record.started,
        warnings=tuple(said),
        program="dump",
        hashes=hashes,
        finished=dump.record.finished,
        imported=dump.record,
    )
    write_manifest(folder, record)
    return open_run(folder)


def _arithmetic(policy: Policy) -> str:
    """Return whose products are emulated, as a device: a dump does not say its own.

    Those of float32 operands are made in float32, as on a CPU, unless the policy asks for a preset, which GPUs make.
    """
    return f"{'gpu' if policy.matmul in PRESETS else 'cpu'} arithmetic (a dump does not say its device)"


def _judged(dump: Imported, config: DecoderConfig) -> JudgedDump:
    """Return what can be judged; raises UserError where nothing can, or where sizes are not the model's."""
    places: dict[Place, DumpTensor] = {}
    left: dict[str, list[str]] = {}
    for place, t in dump.index().items():
        if (why := _why_left(place, dump.record.tokens, config)) is None:
            _check_sizes(dump, place, t, config)
            places[place] = t
        else:
            left.setdefault(why, []).append(place.prompt if why == NO_TOKENS else place.point)
    if not places:
        told = "; ".join(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in left.items())
        raise UserError(f"{dump.folder}: nothing of it can be compared with a model: {told or 'it holds no tensors'}")
    lengths = {case: _length(dump, case, places) for case in dict.fromkeys(p.prompt for p in places)}
    for case, n in lengths.items():
        ids = dump.record.tokens[case]
        if max(ids) >= config.vocab:
            raise UserError(f"{dump.folder}: {case} has token {max(ids)}, and the model {config.vocab} tokens")
        if n > config.context:
            raise UserError(f"{dump.folder}: {case} has {n} tokens, and the model a context of {config.context}")
    notes = [f"not judged: {_some(names)} ({why})" for why, names in left.items()]
    return JudgedDump(dump, config, places, lengths, tuple(notes))


NO_TOKENS = "the dump does not say which tokens it was fed; name them in the map: tokens = NAME"


def _why_left(place: Place, tokens: Mapping[str, Sequence[int]], config: DecoderConfig) -> str | None:
    """Return why a tensor is not judged, or None."""
    row = POINTS.get(place.point)
    if row is None:
        return "no points of ours"
    if place.point not in present(config.sparse):
        return "the model has no such point"
    if row.state:
        return "a cache is judged by the rows of k and v that were written to it"
    if place.phase not in PHASES:
        return f"rows of {place.phase}: a dump is judged in prefill and decode"
    if (place.layer is not None) != row.per_layer:
        return "the map does not say whose layer it is" if row.per_layer else "it belongs to no layer"
    return None if tokens.get(place.prompt) else NO_TOKENS


def _check_sizes(dump: Imported, place: Place, t: DumpTensor, config: DecoderConfig) -> None:
    """Raise UserError where a tensor's axes other than rows and keys are not the model's."""
    if place.layer is not None and place.layer >= config.layers:
        raise UserError(f"{dump.folder}: {place.text} ({t.source!r}): the model has {config.layers} layers")
    axes = POINTS[place.point].axes
    wanted = shape_of(axes, config)
    if any(a not in "TS" and n != m for a, n, m in zip(axes, t.shape, wanted, strict=True)):
        sizes = ", ".join(a if a in "TS" else str(m) for a, m in zip(axes, wanted, strict=True))
        raise UserError(
            f"{dump.folder}: {place.text} ({t.source!r}) is {list(t.shape)}, and of this model [{sizes}]: it is of "
            "another model, or its axes are in another order (axes = in the map)"
        )


def _length(dump: Imported, case: str, places: Mapping[Place, DumpTensor]) -> int:
    """Return how many tokens a case's prompt has; raises UserError where the dump's tokens are too few."""
    fed, mine = len(dump.record.tokens[case]), {p: t for p, t in places.items() if p.prompt == case}
    last = max(p.step for p in mine)
    rows = [t.shape[POINTS[p.point].axes.index("T")] for p, t in mine.items() if p.phase == "prefill"]
    n = max(rows, default=0)
    n = n if n > 1 else fed - last
    if n < 1 or n + max(last - 1, 0) + (last > 0) > fed:
        raise UserError(
            f"{dump.folder}: {case} has {n} rows" + (f" and {last} decode steps" if last else "") + f", and {fed} "
            "tokens; tokens = in the map names those of the prompt and those that decode was fed"
        )
    return n


def _last_alone(place: Place, rows: int) -> bool:
    return place.point == LOGITS and rows == 1


def _unknown_locals(asked: Requested, config: DecoderConfig) -> Iterator[str]:
    """Yield the points that have no local error, since what they are made of is not in the dump."""
    for phase in asked.phases:
        calls = [call.split(" ") for call in asked.calls if call.startswith(phase)]
        lacking = {
            name
            for _, step in calls
            for name in asked.calls[f"{phase} {step}"]
            if POINTS[name].inputs
            and not has_inputs(asked, config, (phase, int(step), 0 if POINTS[name].per_layer else None, name))
        }
        if lacking:
            names = ", ".join(name for name in POINTS if name in lacking)
            yield f"no local error in {phase} of {names}: what they are made of is not in the dump"
    if asked.layers != tuple(range(config.layers)) and asked.layers:
        yield f"the dump holds layers {spans(asked.layers)} of {config.layers}"


def _point_records(held: JudgedDump, policy: Policy, tell: Advance) -> Iterator[PointRecord]:
    """Yield the lines of points.jsonl; numbers that are held in another format than they were written in have files."""
    from safetensors.numpy import save_file

    files: dict[str, list[Place]] = {}
    for place, t in held.places.items():
        files.setdefault(t.file, []).append(place)
    for i, (file, places) in enumerate(files.items()):
        tell(i, len(files), "reading the dump")
        other, cast = file.replace(".safetensors", ".as-run.safetensors"), dict[str, Array]()
        for place in places:
            t = held.places[place]
            x = held.dump.tensor(t)
            y = in_policy_format(x, point_format(policy, place.point))
            if y is not x:
                cast[t.key] = y
            tensor = Tensor(place.layer, place.point, POINTS[place.point].axes, held.positions(place), y, False)
            yield point_record(tensor, y, place.prompt, place.phase, place.step, file if y is x else other)
        if cast:
            save_file(cast, held.dump.folder / other)


def _prompts(held: JudgedDump) -> Iterator[PromptRecord]:
    for case, n in held.lengths.items():
        yield PromptRecord(id=case, text="", tokens=held.dump.record.tokens[case][:n])


def _steps(held: JudgedDump) -> Iterator[StepRecord]:
    """Yield a line for every row of logits, and for every token that decode was fed; FP64 has logits at these."""
    for case, n in held.lengths.items():
        tokens = held.dump.record.tokens[case]
        decoded = {p.step for p in held.places if (p.prompt, p.phase) == (case, "decode")}
        every = sorted(decoded | set(range(1, max(decoded, default=0) + 1)))
        for phase, step in [("prefill", 0), *(("decode", s) for s in every)]:
            place = Place(case, phase, step, None, LOGITS)
            if place in held.places:
                rows = held.positions(place)
                logits = held.dump.tensor(held.places[place]).astype(np.float64)
                fed = [tokens[i] if i < len(tokens) else 0 for i in rows]
                yield from step_records(LogitsCall(case, phase, step, n - 1), rows, fed, logits)
                continue
            at = n - 1 + step
            yield StepRecord(
                prompt=case,
                phase=phase,
                step=step,
                position=at,
                token=tokens[at],
                top_ids=(),
                top_logits=(),
                gap=0.0,
                logsumexp=0.0,
            )


def _some(names: Sequence[str]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:NAMED]) + (f" and {len(every) - NAMED} more" if len(every) > NAMED else "")
