"""The verb ``trace``: check everything first, then run and record."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from precaudit.arrays import release
from precaudit.checkpoints.tensors import count_nonfinite
from precaudit.coverage import predicted_bytes
from precaudit.errors import UserError
from precaudit.graphs.decoder import present, support
from precaudit.policies import fused
from precaudit.progress import Progress
from precaudit.prompts import NoTemplate, Prompt, check_tokens, encode_prompt, read_prompts, shipped_prompts
from precaudit.records import PromptRecord, Requested
from precaudit.selection import Selection, choose_prompts, parse_layers, parse_positions
from precaudit.store import Run, RunWriter, check_space, open_run, prepare_folder
from precaudit.tracing.manifest import begin, now
from precaudit.tracing.session import Batch, Session
from precaudit.tracing.subject import Subject, load
from precaudit.tracing.writer import Background

# FLOP/s, to tell seconds from hours: a CPU's is of `make demo` on two cores (7.6e11 in 75 s); the others are guesses
SPEED = {"cpu": 1e10, "gpu": 5e13, "tpu": 5e13}


@dataclass(frozen=True)
class Options:
    """How to run; ``tokens_from``: a run whose prompts and generated tokens are used instead of greedy ones."""

    decode_steps: int = 8
    batch: int = 1
    pad: str = "right"
    tokens_from: Path | None = None
    force: bool = False
    command: str = "precaudit.trace(...)"


def trace(
    subject: Subject | str,
    output: Path | str,
    prompts: Path | str | Sequence[Prompt] | None = None,
    select: Selection | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run ``subject`` over prompts with taps and write a run to the folder ``output``; return it opened.

    ``prompts``: a JSONL file or Prompt records (None: the shipped ones). Raises UserError before anything is written
    when something asked for is not possible: a layer out of range, a prompt too long, no space, a folder in use.
    """
    subject = load(subject) if isinstance(subject, str) else subject
    select, options, progress = select or Selection(), options or Options(), progress or Progress()
    folder = Path(output)
    found, forced, requested = _request(subject, prompts, select, options, progress.say)
    lengths = [len(p.tokens) for p in found]
    size = predicted_bytes(requested, subject.config, subject.policy, lengths)
    progress.say(_announcement(subject, found, requested, size))
    check_space(folder, size + (1 << 20))
    prepare_folder(folder, options.force)
    record = begin(subject, requested, folder.resolve().name, options.command)
    warnings = weight_warnings(subject)
    for warning in warnings:
        progress.say(f"warning: {warning}")
    record = msgspec.structs.replace(record, warnings=tuple(warnings))
    writer = RunWriter(folder, record, found)
    try:
        with Background() as background:
            session = Session(subject, requested, writer, background, forced)
            _run_all(session, found, requested, progress)
    finally:
        writer.close()
    for name in session.absent:
        progress.say(f"left out: {name}: the program has no such tap")
    writer.finish(
        msgspec.structs.replace(
            record,
            requested=_without(requested, session.absent),
            neutrality=tuple(session.neutrality),
            finished=now(),
        )
    )
    return open_run(folder)


def _without(requested: Requested, absent: Collection[str]) -> Requested:
    """Return what was requested without points that the program does not show."""
    points, support = (tuple(p for p in x if p not in absent) for x in (requested.points, requested.support))
    return msgspec.structs.replace(requested, points=points, support=support)


def _run_all(session: Session, prompts: list[PromptRecord], requested: Requested, progress: Progress) -> None:
    batches = [prompts[i : i + requested.batch] for i in range(0, len(prompts), requested.batch)]
    per_batch = 1 if requested.phases == ("prefill",) else requested.decode_steps + 2 + ("rescore" in requested.phases)
    total, done = len(batches) * per_batch, 0
    for batch in batches:
        names = ", ".join(p.id for p in batch)

        def advance(what: str, names: str = names) -> None:
            nonlocal done
            done += 1
            progress.advance(done, total, f"{names} {what}")

        session.run(Batch.of(batch, requested), advance)


def _request(
    subject: Subject,
    prompts: Path | str | Sequence[Prompt] | None,
    select: Selection,
    options: Options,
    say: Callable[[str], None],
) -> tuple[list[PromptRecord], dict[str, Sequence[int]], Requested]:
    if options.decode_steps < 0 or options.batch < 1:
        raise UserError("--decode-steps must be at least 0 and --batch at least 1")
    layers = parse_layers(select.layers, subject.config.layers)
    steps = options.decode_steps
    forced: dict[str, Sequence[int]] = {}
    if options.tokens_from is not None:
        found, forced, steps = _given(open_run(options.tokens_from), select, options)
    else:
        found = _encoded(subject, prompts, select, say)
    more = 0 if select.phases == ("prefill",) else steps
    for p in found:
        given = forced.get(p.id, ())
        check_tokens(
            p.id, (*p.tokens, *given[:more]), more - len(given[:more]), subject.config.vocab, subject.config.context
        )
        if not parse_positions(select.positions, len(p.tokens)) and "prefill" in select.phases:
            raise UserError(f"--positions {select.positions} names none of prompt {p.id!r}'s {len(p.tokens)} positions")
    points = tuple(p for p in select.points if p in present(subject.config.sparse))
    if not points:
        raise UserError(f"none of {', '.join(select.points)} is a point of {subject.checkpoint.name}")
    requested = Requested(
        prompts=tuple(p.id for p in found),
        layers=layers,
        points=points,
        support=support(points, select.phases, subject.config.sparse, fused(subject.policy)),
        phases=select.phases,
        positions=select.positions,
        every_logit=select.every_logit,
        decode_steps=more,
        batch=options.batch,
        pad=options.pad,
        tokens_from=str(options.tokens_from) if options.tokens_from is not None else None,
        cache_hashes=True,
    )
    return found, forced, requested


def _encoded(
    subject: Subject, prompts: Path | str | Sequence[Prompt] | None, select: Selection, say: Callable[[str], None]
) -> list[PromptRecord]:
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


def _given(run: Run, select: Selection, options: Options) -> tuple[list[PromptRecord], dict[str, Sequence[int]], int]:
    """Return another run's prompts and the tokens it fed after them."""
    wanted = choose_prompts(select.prompts, list(run.prompts))
    forced: dict[str, Sequence[int]] = {}
    for name in wanted:
        fed = {s.position: s.token for s in run.steps if s.prompt == name and s.phase == "decode" and s.step > 0}
        forced[name] = tuple(fed[p] for p in sorted(fed))
    steps = min(map(len, forced.values()))
    if steps == 0 and select.phases != ("prefill",):
        raise UserError(f"{run.folder}: no decode steps were recorded there, so there are no tokens to take from it")
    return [run.prompts[name] for name in wanted], forced, min(steps, options.decode_steps)


def _announcement(subject: Subject, prompts: list[PromptRecord], requested: Requested, size: int) -> str:
    tokens = sum(len(p.tokens) for p in prompts)
    passes = tokens * (1 + len(requested.phases)) + len(prompts) * requested.decode_steps
    seconds = 2.0 * subject.config.parameters * passes / SPEED.get(subject.platform, SPEED["cpu"])
    scale = "seconds" if seconds < 60 else "minutes" if seconds < 3600 else "hours"
    return (
        f"{subject.checkpoint.name} ({subject.config.layers} layers, "
        f"{subject.config.parameters / 1e6:.1f} M parameters), "
        f"policy {subject.policy.name}, {subject.platform}: {len(prompts)} prompts, {tokens} tokens; "
        f"writes about {size / 1e6:,.1f} MB, takes {scale}"
    )


def weight_warnings(subject: Subject) -> list[str]:
    """Return a warning for every tensor with NaN or infinite values."""
    found = []
    for name in subject.checkpoint.tensors.shapes():
        x = subject.checkpoint.tensors.read(name)
        bad = count_nonfinite(x)
        release(x)
        if bad:
            found.append(f"weights: tensor {name!r} has {bad} values that are NaN or infinite")
    return found
