"""One trace: prefill, decode and rescore of every prompt, as docs/files.md defines them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.mesh.sums import splits_by_point
from precaudit.interpreters.tpu.units import products_of, ways_by_place
from precaudit.numbers.arrays import Array, to_single
from precaudit.recording.runs.hosts import Hosts
from precaudit.recording.runs.several import SharedWriter
from precaudit.recording.runs.writer import RunWriter
from precaudit.recording.tracing.devices import platform_of
from precaudit.recording.tracing.parts import gathered, record_parts
from precaudit.recording.tracing.predicting import compare_predictions, compiler_output
from precaudit.recording.tracing.programs import Capture, decode_program, prefill_program, without_slots
from precaudit.recording.tracing.recording import CallOutputs, Recording, record
from precaudit.recording.tracing.subject import Subject
from precaudit.recording.tracing.writer import Background
from precaudit.schema.coverage import ExpectedTensor, expected_tensors
from precaudit.schema.graphs.decoder import LOGITS, POINTS, shape_of
from precaudit.schema.lengths import SMALLEST, bucket, row_lengths
from precaudit.schema.meshes import ONE, MeshShape
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import json_number
from precaudit.schema.records.runs import Neutrality, PromptRecord, Requested

T = TypeVar("T")
Begin = Callable[[str, int], None]  # what a call does, and how many tokens it runs
WHOLE = 1 << 25  # bytes that a call may move from the device though fewer are recorded
SHARED = 5e10  # flops that padding may add where it saves compiling: a second of a core, and programs take more


@dataclass(frozen=True)
class Batch:
    """Prompts run together, what is recorded of each, on which side they are padded, and the steps decoded after.

    Prefill, decode and rescore have one ``length``, of tokens and of the cache: prefill and rescore are one program.
    ``slots``: its least. ``rows``: how many sequences are run: the last prompt fills up what a mesh divides.
    """

    prompts: tuple[PromptRecord, ...]
    plan: tuple[tuple[ExpectedTensor, ...], ...]
    pad: str
    steps: int = 0
    slots: int = 0
    rows: int = 0

    @classmethod
    def of(cls, prompts: Sequence[PromptRecord], requested: Requested, mesh: MeshShape = ONE) -> "Batch":
        """Plan what is recorded of ``prompts``, which run on a mesh."""
        plan = tuple(tuple(expected_tensors(requested, len(p.tokens))) for p in prompts)
        steps = 0 if requested.phases == ("prefill",) else requested.decode_steps
        return cls(tuple(prompts), plan, requested.pad, steps, rows=mesh.filled(len(prompts)))

    def filled(self, each: Sequence[T]) -> list[T]:
        """Return what each prompt has for each sequence that is run."""
        return [*each, *[each[-1]] * (self.rows - len(each))]

    @property
    def length(self) -> int:
        """The slots of a sequence: the longest prompt and what is decoded after it, in a bucket."""
        return max(self.slots, bucket(max(len(p.tokens) for p in self.prompts) + self.steps))

    def arrays(self, sequences: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return tokens [B, length] and starts [B]; left padding aligns ends, the bucket's rest is on the right."""
        longest = max(map(len, sequences))
        tokens = np.zeros((len(sequences), self.length), np.int32)
        starts = np.zeros(len(sequences), np.int32)
        for b, sequence in enumerate(sequences):
            starts[b] = longest - len(sequence) if self.pad == "left" else 0
            tokens[b, starts[b] : starts[b] + len(sequence)] = sequence
        return tokens, starts

    def lengths(self, phase: str) -> Array:
        """Return how long each sequence was when a row of it was turned [B, length] (precaudit/schema/lengths.py)."""
        sizes = [len(p.tokens) for p in self.filled(self.prompts)]
        return np.stack([row_lengths(phase, n, n + self.steps, self.length) for n in sizes])

    def tokens(self, requested: Requested) -> int:
        """How many tokens its calls run, padding among them; a decode step runs one of each prompt."""
        n, rows = self.rows, self.rows * self.length
        if requested.phases == ("prefill",):
            return rows
        return rows * (2 if "rescore" in requested.phases else 1) + n * (requested.decode_steps + 1)

    def at(self, phase: str, step: int) -> tuple[tuple[ExpectedTensor, ...], ...]:
        """Return the entries of one call, for each prompt."""
        return tuple(tuple(e for e in plan if (e.phase, e.step) == (phase, step)) for plan in self.plan)


def run_batches(
    groups: Iterable[Sequence[PromptRecord]], requested: Requested, parameters: int, mesh: MeshShape = ONE
) -> list[Batch]:
    """Return the batches of all prompts of a run that run together, of a model of so many parameters.

    Those of the smallest bucket share the programs of the next where another batch has it and padding costs little.
    """
    found = [Batch.of(prompts, requested, mesh) for prompts in groups]
    small, large = SMALLEST
    short = [b for b in found if b.length == small]
    padding = sum(b.rows * (large - small) * (1 if b.steps == 0 else 3) for b in short)
    if 2 * parameters * padding > SHARED or all(b.length != large for b in found):
        return found
    return [replace(b, slots=large) if b.length == small else b for b in found]


class CallInputs(NamedTuple):
    """What a call is given of its own: tokens, slots of first rows, rows, the cache, and the rows to gather."""

    tokens: Any
    starts: Array
    rows: Any
    cache: Any
    take: Any = None


@dataclass
class Session:
    """Runs batches and hands what they record to the writer. ``forced``: given tokens after each prompt.

    ``checked``: the compiled programs whose neutrality is known; ``seen``: those that ran. ``absent``: points within
    operations that the program does not show, since a part of its own has no tap there. ``hosts``: the processes that
    run it together, each of which runs this session.
    """

    subject: Subject
    requested: Requested
    writer: RunWriter | SharedWriter
    background: Background
    forced: Mapping[str, Sequence[int]] = field(default_factory=dict)
    neutrality: list[Neutrality] = field(default_factory=list)
    checked: set[Any] = field(default_factory=set)
    absent: dict[str, None] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)
    hosts: Hosts = field(default_factory=Hosts)

    def run(self, batch: Batch, begin: Begin) -> None:
        """Run every requested phase of one batch; ``begin`` is told of each call, before it runs."""
        phases, sequences = self.requested.phases, [p.tokens for p in batch.filled(batch.prompts)]
        firsts = [len(s) - 1 for s in sequences]
        logits, cache = self._prefill(batch, "prefill", sequences, firsts, begin)
        if phases == ("prefill",):
            return
        generated = self._decode(batch, sequences, logits, cache, begin)
        if "rescore" in phases:
            longer = [[*s, *g] for s, g in zip(sequences, generated, strict=True)]
            self._prefill(batch, "rescore", longer, firsts, begin)

    def _capture(self, batch: Batch, phase: str, step: int) -> Capture:
        """Return what a call collects; rows are gathered, or hashed, on the device where fewer are recorded.

        Where what is left out is small, the recording cuts and hashes: that saves a program to compile for every
        length.
        """
        every = [e for plan in batch.at(phase, step) for e in plan if e.point != LOGITS]
        summed, here = frozenset(e.source for e in every if e.summed), [e for e in every if not e.summed]
        points = summed.union(e.point for e in here)
        cut = [e for e in here if e.hashed or (phase != "decode" and len(e.positions) < e.keys and e.layer is not None)]
        n, config = batch.length, self.subject.config
        hashed = frozenset(e.point for e in cut if e.hashed)
        if sum(4 * prod(shape_of(POINTS[e.point].axes, config, n, n)) for e in cut) <= WHOLE:
            on_device = hashed if self.hosts.several else frozenset()  # no process holds a row whole
            return Capture(points, self.requested.layers, hashed=on_device, summed=summed)
        return Capture(points, self.requested.layers, frozenset(e.point for e in cut) - hashed, hashed, summed)

    def _take(self, batch: Batch, capture: Capture, phase: str, starts: Array) -> Array | None:
        """Return the slots [B, P] of the rows to gather; short lists repeat their last row."""
        if not capture.gathered:
            return None
        lists = []
        for b, plan in enumerate(batch.filled(batch.at(phase, 0))):
            rows = next((e.positions for e in plan if e.point in capture.gathered), (0,))
            lists.append([int(starts[b]) + p for p in rows])
        width = max(map(len, lists))
        return np.asarray([rows + rows[-1:] * (width - len(rows)) for rows in lists], np.int32)

    def _whole(self, batch: Batch, phase: str, given: CallInputs) -> tuple[Any, ...]:
        """Return all arguments of a call: the parameters, RoPE's tables, and its own."""
        tokens, starts, rows, cache, take = given
        tables = self.subject.tables(batch.length, batch.lengths(phase))
        if self.subject.layout is not None:
            tokens, starts, rows, take = self.subject.put_by_prompt((tokens, starts, rows, take))
        return self.subject.parameters, tables, tokens, starts, rows, cache, take

    def _cache(self, batch: Batch) -> Any:
        """Return an empty cache; None when nothing is decoded."""
        if self.requested.phases == ("prefill",):
            return None
        shapes = jax.eval_shape(partial(self.subject.decoder.init_cache, batch.rows, batch.length))
        return self.subject.put_cache(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes))

    def _width(self, batch: Batch) -> int:
        """Return how many logits rows prefill gives: one for every slot, or the last, and those of rescore."""
        if self.requested.every_logit:
            return batch.length
        return 1 + (self.requested.decode_steps if "rescore" in self.requested.phases else 0)

    def _prefill(
        self, batch: Batch, phase: str, sequences: Sequence[Sequence[int]], firsts: list[int], begin: Begin
    ) -> tuple[Array, Any]:
        """Run whole sequences; return the logits [B, V] at each prompt's last position, and the cache."""
        tokens, starts = batch.arrays(sequences)
        if self.requested.every_logit:
            spans = [tuple(range(len(s))) for s in sequences]
        else:
            spans = [tuple(range(first, len(s))) for first, s in zip(firsts, sequences, strict=True)]
        width = self._width(batch)
        rows = np.asarray(
            [[s + r for r in (span + span[-1:] * width)[:width]] for s, span in zip(starts, spans, strict=True)]
        )
        rows = rows.astype(np.int32)
        capture = self._capture(batch, phase, 0)
        take = self._take(batch, capture, phase, starts)
        program = prefill_program(self.subject, capture)
        given = CallInputs(tokens, starts, rows, self._cache(batch), take)
        begin(self._label(phase, capture, given, f"{phase} of {tokens.shape[1]} tokens", phase), tokens.size)
        check = self._is_first_call(phase, capture, given)
        logits, cache, taps = program(*self._whole(batch, phase, given))
        logits = self._logits(logits)
        if check:
            run = program, self._whole(batch, phase, given)
            plain = prefill_program(self.subject, None)
            bare = plain, self._whole(batch, phase, given._replace(cache=self._cache(batch), take=None))
            self._compare(CallOutputs(phase, 0, capture, starts, (), None, {}, logits), batch, tokens.shape, run, bare)
        fed = [np.asarray(s)[list(span)] for s, span in zip(sequences, spans, strict=True)]
        self._record(batch, CallOutputs(phase, 0, capture, starts, tuple(spans), fed, taps, logits))
        at = [span.index(first) for span, first in zip(spans, firsts, strict=True)]
        return np.asarray(logits)[np.arange(len(at)), at], cache

    def _decode(
        self, batch: Batch, sequences: Sequence[Sequence[int]], prefill: Array, cache: Any, begin: Begin
    ) -> list[list[int]]:
        """Decode from prefill's cache without its last token; return the tokens fed after the prompt."""
        tokens, starts = batch.arrays(sequences)
        ends = starts + np.asarray([len(s) for s in sequences], np.int32)
        each = np.arange(len(tokens))
        token = tokens[each, ends - 1]
        cache = without_slots(cache, ends - 1)
        cache = cache if self.subject.layout is None else self.subject.put_cache(cache)
        fed: list[Array] = []
        for step in range(self.requested.decode_steps + 1):
            capture = self._capture(batch, "decode", step)
            slots = (ends - 1 + step).astype(np.int32)
            given = CallInputs(self.subject.put_by_prompt(token), starts, slots, cache)
            step_of = f"decode step {step} of {self.requested.decode_steps}"
            begin(self._label("decode", capture, given, f"a decode step of {batch.length} slots", step_of), len(each))
            check = "decode" in self.requested.phases and self._is_first_call("decode", capture, given)
            before = jax.tree.map(jnp.copy, cache) if check else None
            logits, cache, taps = decode_program(self.subject, capture)(*self._whole(batch, "decode", given))
            logits = self._logits(logits)
            rows = tuple((len(s) - 1 + step,) for s in sequences)
            call = CallOutputs("decode", step, capture, starts, rows, token[:, None], taps, logits)
            if check:
                whole = self._whole(batch, "decode", given._replace(cache=before))
                run, bare = ((decode_program(self.subject, c), whole) for c in (capture, None))
                self._compare(call, batch, jax.tree.leaves(cache)[0].shape[1:3], run, bare)
            self._record(batch, call)
            token = self._next(batch, step, prefill if step == 0 else np.asarray(logits)[:, 0])
            fed.append(token)
        return [[int(t[b]) for t in fed[:-1]] for b in each]

    def _logits(self, x: object) -> Any:
        """Return logits where every process has them whole."""
        return gathered(x) if self.hosts.several else x

    def _next(self, batch: Batch, step: int, logits: Array) -> Array:
        """Return the tokens [B] fed at ``step + 1``: given ones, or greedy."""
        if self.forced and step < self.requested.decode_steps:
            return np.asarray([self.forced[p.id][step] for p in batch.filled(batch.prompts)], np.int32)
        return np.argmax(to_single(logits), axis=-1).astype(np.int32)

    def _program(self, phase: str, capture: Capture, given: CallInputs) -> Any:
        """Return what makes a compiled program: the phase, what it captures and its shapes."""
        shapes = tuple(np.shape(x) for x in jax.tree.leaves(given))
        return (phase, self.subject.decoder, capture, shapes)

    def _label(self, phase: str, capture: Capture, given: CallInputs, compiled: str, what: str) -> str:
        """Return what a call is called: that it compiles, where it is the first of its program."""
        program = self._program("decode" if phase == "decode" else "prefill", capture, given)
        label = what if program in self.seen else f"compiling {compiled}"
        self.seen.add(program)
        return label

    def _is_first_call(self, phase: str, capture: Capture, given: CallInputs) -> bool:
        """Whether this is the first call of a compiled program."""
        program = self._program(phase, capture, given)
        first = bool(capture.points) and program not in self.checked
        self.checked.add(program)
        return first

    def _compare(
        self, call: CallOutputs, batch: Batch, shape: Sequence[int], run: tuple[Any, Any], bare: tuple[Any, Any]
    ) -> None:
        """Note whether capturing left a call's logits as they were, bit for bit.

        ``run``, ``bare``: the program with taps and without, each with its arguments, which the second may take over.
        """
        expected, several = compare_predictions(*run, *bare), self.subject.mesh.devices > 1
        text = compiler_output(*run, platform_of(self.subject.device), several)
        made = {} if text is None or self.subject.platform != "tpu" else ways_by_place(products_of(text))
        split = splits_by_point(text) if several and text is not None else None
        a, b = np.asarray(call.logits), np.asarray(self._logits(bare[0](*bare[1])[0]))
        same = has_same_bits(a, b)
        diff, apart = 0.0, tuple(0.0 for _ in batch.prompts)
        if not same:
            change = [to_single(x) - to_single(y) for x, y in zip(b, a, strict=True)]
            diff = float(max(np.max(np.abs(c)) for c in change))
            apart = tuple(ratio(norm(c), norm(to_single(y))) for c, y in zip(change, a, strict=True))[: len(apart)]
        ids = tuple(p.id for p in batch.prompts)
        self.neutrality.append(
            Neutrality(
                phase=call.phase,
                step=call.step,
                prompts=ids,
                shape=tuple(shape),
                bitwise=same,
                max_diff=json_number(diff),
                apart=tuple(map(json_number, apart)),
                predicted=expected,
                made=made,
                split=split,
            )
        )

    def _record(self, batch: Batch, call: CallOutputs) -> None:
        """Hand a call's outputs to the writer, where any of them was asked for."""
        here, asked = batch.at(call.phase, call.step), call.phase in self.requested.phases
        inner = {e.source for plan in here for e in plan if POINTS[e.source].within is not None}
        self.absent.update(dict.fromkeys(sorted(inner - set(call.taps))))
        if asked or any(here):
            whole = Recording(call, batch.prompts, here, self.requested.layers, asked)
            if isinstance(self.writer, SharedWriter):
                self.background.put(partial(record_parts, whole, self.writer))
            else:
                self.background.put(partial(record, whole, self.writer))


def has_same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are the same, bit for bit; a NaN is a NaN, whose sign and payload XLA may choose anew."""
    if a.tobytes() == b.tobytes():
        return True
    nan = np.isnan(a) & np.isnan(b)
    return bool(nan.any()) and np.where(nan, 0, a).tobytes() == np.where(nan, 0, b).tobytes()
