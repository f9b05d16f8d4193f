"""The verb ``trace``: check everything first, then run and record."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from precaudit.caching import TRACES, computed_by
from precaudit.errors import UserError
from precaudit.models.checkpoints.tensors import count_nonfinite
from precaudit.models.jax_decoder.sharding import check_mesh
from precaudit.numbers.arrays import release
from precaudit.numbers.bytes_text import bytes_text
from precaudit.progress import Progress
from precaudit.recording.runs import unfinished
from precaudit.recording.runs.folders import check_space, prepare_folder
from precaudit.recording.runs.hosts import ALONE, Hosts, hosts_here
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.runs.several import writer_of
from precaudit.recording.runs.shards import remove_shards
from precaudit.recording.tracing.conditions import now
from precaudit.recording.tracing.manifest import asked_in_words, begin
from precaudit.recording.tracing.predicting import assumptions
from precaudit.recording.tracing.session import Batch, Session, run_batches
from precaudit.recording.tracing.subject import Subject, load
from precaudit.recording.tracing.writer import Background
from precaudit.schema.coverage import points_with_sums, predicted_bytes
from precaudit.schema.digits import count_text
from precaudit.schema.graphs.decoder import hidden, present, support
from precaudit.schema.policies import keeps_unrounded
from precaudit.schema.prompts import NoTemplate, Prompt, check_tokens, encode_prompt, read_prompts, shipped_prompts
from precaudit.schema.records.runs import BatchRecord, PromptRecord, Requested, RunRecord
from precaudit.schema.selection import Selection, choose_prompts, parse_layers, parse_positions


@dataclass(frozen=True)
class TraceOptions:
    """How to run; ``tokens_from``: a run whose prompts and generated tokens are used instead of greedy ones.

    ``forced``: tokens that are fed after each prompt, by its id, at least as many as steps. ``resume``: go on
    with a run that was cut off, which is the one that is asked for. ``batch``: prompts run together; None: one, or one
    for each part of a mesh that prompts are cut over.
    """

    decode_steps: int = 8
    batch: int | None = None
    pad: str = "right"
    tokens_from: Path | None = None
    force: bool = False
    command: str = "precaudit.trace(...)"
    resume: bool = False
    forced: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True)
class TraceWork:
    """What is traced: all prompts in batches, the tokens given to them, the manifest, and what is there already."""

    subject: Subject
    prompts: Sequence[PromptRecord]
    forced: Mapping[str, Sequence[int]]
    record: RunRecord
    kept: unfinished.Continuation | None = None

    @property
    def batches(self) -> list[Batch]:
        """The batches, those that are there among them."""
        asked = self.record.requested
        groups = (self.prompts[i : i + asked.batch] for i in range(0, len(self.prompts), asked.batch))
        return run_batches(groups, asked, self.subject.config.parameters, self.subject.mesh)

    def mark(self, batch: Batch, session: Session, before: tuple[int, int]) -> BatchRecord:
        """Return what is noted of a batch that is written; ``before``: what the session had noted until then."""
        ids = tuple(p.id for p in batch.prompts)
        return BatchRecord(
            prompts=ids,
            steps=(0, ""),
            points=(0, ""),
            bytes=0,
            code=subject_code_hash(self.subject),
            fed=forced_tokens_hash(self.forced, ids),
            neutrality=tuple(session.neutrality[before[0] :]),
            absent=tuple(session.absent)[before[1] :],
        )


def trace(
    subject: Subject | str,
    output: Path | str,
    prompts: Path | str | Sequence[Prompt] | None = None,
    select: Selection | None = None,
    options: TraceOptions | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run ``subject`` over prompts with taps and write a run to the folder ``output``; return it opened.

    ``prompts``: a JSONL file or Prompt records (None: the shipped ones). Raises UserError before anything is written
    when something asked for is not possible: a layer out of range, a prompt too long, no space, a folder in use, a run
    to go on with that is another.
    """
    subject = load(subject) if isinstance(subject, str) else subject
    select, options, progress = select or Selection(), options or TraceOptions(), progress or Progress()
    if options.resume and options.force:
        raise UserError("give --resume or --force, not both: --force starts again from nothing")
    folder = Path(output)
    found, forced, requested = _request(subject, prompts, select, options, progress.say)
    work = TraceWork(subject, found, forced, begin(subject, requested, folder.resolve().name, options.command))
    if options.resume:
        record = unfinished.before(folder)
        unfinished.check_same(folder, record, work.record, found)
        if record.finished is not None:
            progress.say(f"{folder}: finished already, at {record.finished}; nothing to do")
            return open_run(folder)
        kept = unfinished.whole_batches(folder, record, subject_code_hash(subject), partial(forced_tokens_hash, forced))
        work = replace(work, kept=kept if kept.batches else None)
    size = predicted_bytes(requested, subject.config, subject.policy, [len(p.tokens) for p in found])
    progress.say(_announcement(work, size))
    _record(work, folder, size, options, progress)
    return open_run(folder)


def check_request(
    subject: Subject, prompts: Path | str | Sequence[Prompt] | None, select: Selection, options: TraceOptions
) -> None:
    """Raise UserError where something asked for is not possible, as ``trace`` does before it writes."""
    _request(subject, prompts, select, options, lambda _line: None)


def _record(work: TraceWork, folder: Path, size: int, options: TraceOptions, progress: Progress) -> None:
    """Run and write what is not there yet."""
    kept, record, hosts = work.kept, work.record, hosts_here()
    hosts.agree("what is traced", _facts(work, folder))
    record = record if kept is None else kept.record
    if hosts.first:
        check_space(folder, size + (1 << 20) - (0 if kept is None else kept.bytes))
        if kept is None:
            prepare_folder(folder, options.force or options.resume)
        else:
            unfinished.trim(folder, kept)
            remove_shards(folder)
            progress.say(f"{folder}: {kept.prompts} of {len(work.prompts)} prompts are there; goes on with the others")
    target = work.subject.predicted
    warnings = [*weight_warnings(work.subject, hosts), *(() if target is None else assumptions(target))]
    for warning in warnings:
        progress.say(f"warning: {warning}")
    record = msgspec.structs.replace(record, warnings=tuple(warnings))
    writer = writer_of(folder, record, work.prompts, None if kept is None else kept.bytes, hosts)
    try:
        with Background() as background:
            session = Session(work.subject, record.requested, writer, background, work.forced, hosts=hosts)
            if kept is not None:
                session.neutrality, session.absent = kept.neutrality, kept.absent
            _run_all(work, session, progress)
    finally:
        writer.close()
    for name in session.absent:
        progress.say(f"left out: {name}: the program has no such tap")
    writer.finish(
        msgspec.structs.replace(
            record,
            requested=_without(record.requested, session.absent),
            neutrality=tuple(session.neutrality),
            finished=now(),
        )
    )


def _facts(work: TraceWork, folder: Path) -> dict[str, str]:
    """Return what all processes have to have alike, by what it is called."""
    prompts = hashlib.sha256(repr([(p.id, p.tokens) for p in work.prompts]).encode()).hexdigest()
    return {
        "the folder -o": str(folder),
        "the prompts' tokens": prompts,
        "--mesh": str(work.subject.mesh),
        **asked_in_words(work.record),
        "precaudit's own source": subject_code_hash(work.subject),
        "the tokens that are given": forced_tokens_hash(work.forced, [p.id for p in work.prompts]),
        "the batches that are there": str(0 if work.kept is None else len(work.kept.batches)),
    }


def subject_code_hash(subject: Subject) -> str:
    """Return the hash of what runs a subject beside the model and the policy: our source, and how it is compiled."""
    how = (computed_by(TRACES), subject.remat, subject.raised, subject.predicted, subject.mesh)
    return hashlib.sha256(repr(how).encode()).hexdigest()


def forced_tokens_hash(forced: Mapping[str, Sequence[int]], prompts: Sequence[str]) -> str:
    """Return the hash of the tokens given to prompts; nothing where none are."""
    given = [list(map(int, forced[p])) for p in prompts if p in forced]
    return hashlib.sha256(repr(given).encode()).hexdigest() if given else ""


def _without(requested: Requested, absent: Collection[str]) -> Requested:
    """Return what was requested without points that the program does not show."""
    shown = {
        name: tuple(p for p in getattr(requested, name) if p not in absent)
        for name in ("points", "support", "row_sums")
    }
    return msgspec.structs.replace(requested, **shown)


def _run_all(work: TraceWork, session: Session, progress: Progress) -> None:
    """Run the batches that are not there, and note each that is written."""
    todo, there = work.batches, 0 if work.kept is None else len(work.kept.batches)
    total, done, running = sum(b.tokens(session.requested) for b in todo), 0, 0
    done = sum(b.tokens(session.requested) for b in todo[:there])
    for i, batch in enumerate(todo[there:], there + 1):
        where = f"batch {i} of {len(todo)}" if session.requested.batch > 1 else batch.prompts[0].id

        def begin(what: str, tokens: int, where: str = where) -> None:
            nonlocal done, running
            done, running = done + running, tokens
            progress.advance(done, total, f"{what}, {where}")

        before = len(session.neutrality), len(session.absent)
        session.run(batch, begin)
        session.background.put(partial(session.writer.mark, work.mark(batch, session, before)))
    progress.advance(total, total, "writing")


def _request(
    subject: Subject,
    prompts: Path | str | Sequence[Prompt] | None,
    select: Selection,
    options: TraceOptions,
    say: Callable[[str], None],
) -> tuple[list[PromptRecord], dict[str, Sequence[int]], Requested]:
    batch = subject.mesh.data if options.batch is None else options.batch
    if options.decode_steps < 0 or batch < 1:
        raise UserError("--decode-steps must be at least 0 and --batch at least 1")
    check_mesh(subject.mesh, subject.config, batch)
    layers = parse_layers(select.layers, subject.config.layers)
    steps = options.decode_steps
    forced: dict[str, Sequence[int]] = {}
    if options.tokens_from is not None:
        found, forced, steps = _other_runs_prompts(open_run(options.tokens_from), select, options)
    else:
        found = encode_prompts(subject, prompts, select, say)
        forced = dict(options.forced or {})
        few = [p.id for p in found if options.forced is not None and len(forced.get(p.id, ())) < steps]
        if few:
            raise UserError(f"prompt {few[0]!r} has fewer tokens to feed than {steps}, the steps")
    more = 0 if select.phases == ("prefill",) else steps
    for p in found:
        given = forced.get(p.id, ())
        check_tokens(
            p.id, (*p.tokens, *given[:more]), more - len(given[:more]), subject.config.vocab, subject.config.context
        )
        if not parse_positions(select.positions, len(p.tokens)) and "prefill" in select.phases:
            raise UserError(f"--positions {select.positions} names none of prompt {p.id!r}'s {len(p.tokens)} positions")
    points = _without_hidden(select, subject.policy.attention, say)
    points = tuple(p for p in points if p in present(subject.config.sparse))
    if not points:
        raise UserError(f"none of {', '.join(select.points)} is a point of {subject.checkpoint.name}")
    requested = Requested(
        prompts=tuple(p.id for p in found),
        layers=layers,
        points=points,
        support=support(
            points, select.phases, subject.config.sparse, keeps_unrounded(subject.policy), subject.platform == "tpu"
        ),
        phases=select.phases,
        positions=select.positions,
        every_logit=select.every_logit,
        decode_steps=more,
        batch=batch,
        pad=options.pad,
        tokens_from=str(options.tokens_from) if options.tokens_from is not None else None,
        cache_hashes=True,
    )
    sums = points_with_sums(requested.points, requested.support, subject.config.sparse)
    shown = tuple(p for p in sums if p not in hidden(subject.policy.attention))
    requested = msgspec.structs.replace(requested, row_sums=shown)
    return found, forced, requested


def _without_hidden(select: Selection, attention: str, say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the points asked for without those that the attention kernel hides and nobody named, and say which."""
    lost = [p for p in select.points if p in hidden(attention)]
    if named := [p for p in lost if p not in select.unnamed]:
        raise UserError(
            f"--points {','.join(named)}: attention = {attention} has no such point, it is inside the kernel; leave it "
            "out (attn_out shows it), or use --set attention=naive"
        )
    if lost:
        say(f"left out: {', '.join(lost)}: attention = {attention} does not show them")
    return tuple(p for p in select.points if p not in lost)


def encode_prompts(
    subject: Subject, prompts: Path | str | Sequence[Prompt] | None, select: Selection, say: Callable[[str], None]
) -> list[PromptRecord]:
    """Return the token ids of prompts: of a file, of records, or (None) the shipped ones that the model takes."""
    if prompts is None:
        listed = shipped_prompts()
    elif isinstance(prompts, Path | str):
        listed = read_prompts(Path(prompts))
    else:
        listed = list(prompts)
    wanted = choose_prompts(select.prompts, [p.id for p in listed])
    found = []
    for prompt in (p for p in listed if p.id in wanted):
        try:
            text, tokens = encode_prompt(prompt, None if prompt.tokens is not None else subject.tokenizer)
        except NoTemplate as error:
            if prompts is not None or select.prompts is not None:
                raise
            say(f"left out: {error}")  # shipped prompts are for models of every kind
            continue
        found.append(PromptRecord(id=prompt.id, text=text, tokens=tokens))
    return found


def _other_runs_prompts(
    run: Run, select: Selection, options: TraceOptions
) -> tuple[list[PromptRecord], dict[str, Sequence[int]], int]:
    """Return another run's prompts and the tokens it fed after them."""
    wanted = choose_prompts(select.prompts, list(run.prompts))
    forced: dict[str, Sequence[int]] = {}
    for name in wanted:
        fed = {s.position: s.token for s in run.steps if s.prompt == name and s.phase != "prefill" and s.step > 0}
        forced[name] = tuple(fed[p] for p in sorted(fed))
    steps = min(map(len, forced.values()))
    if steps == 0 < options.decode_steps and select.phases != ("prefill",):
        raise UserError(f"{run.folder}: no decode steps were recorded there, so there are no tokens to take from it")
    return [run.prompts[name] for name in wanted], forced, min(steps, options.decode_steps)


def _announcement(work: TraceWork, size: int) -> str:
    s, c, prompts = work.subject, work.subject.config, count_text(len(work.prompts), "prompt")
    model = f"{s.checkpoint.name} ({c.layers} layers, {c.parameters / 1e6:.1f} M parameters), policy {s.policy.name}"
    tokens = count_text(sum(len(p.tokens) for p in work.prompts), "token")
    return f"{model}, {s.platform}: {prompts}, {tokens}; writes about {bytes_text(size)}"


def weight_warnings(subject: Subject, hosts: Hosts = ALONE) -> list[str]:
    """Return a warning for every tensor with NaN or infinite values; of several processes each reads some tensors."""
    found = []
    for name in list(subject.checkpoint.tensors.shapes())[hosts.index :: hosts.count]:
        x = subject.checkpoint.tensors.read_tensor(name)
        if bad := count_nonfinite(x):
            many = "1 value is" if bad == 1 else f"{bad:,} values are"
            found.append(f"weights: tensor {name!r}: {many} NaN or infinite")
        release(x)
    each = hosts.share("looking for NaN in the weights", "\n".join(found))
    return [line for said in each for line in said.splitlines()]
