"""What token ids say, where the run's tokenizer is here; and the tokens whose errors are largest, in their context."""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from math import isnan, prod
from typing import Any, NamedTuple

from precaudit.errors import UserError
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison
from precaudit.schema.filed import of_kinds
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord, ForwardError

Text = Callable[[Sequence[int]], str]
SHOWN = 10
WINDOW = {True: (40, 20), False: (8, 4)}  # tokens of context before and after, as text and as ids
WIDTH = (56, 24)  # of which so many characters are shown
LONGEST = 16  # characters of a token in a table


class Sequenced(NamedTuple):
    """Token ids of a sequence by position, and the position of one of them."""

    ids: Mapping[int, int]
    position: int


@singledispatch
def token_key(_run: Any, e: ErrorRecord, row: int) -> Hashable:
    """Return what tells a token from others, by a record of it and its row: of a program the call's row."""
    return e.prompt, e.phase, e.step, row


@token_key.register
def _(_run: Run, e: ErrorRecord, row: int) -> Hashable:
    """Rows of a model are positions, which several calls see."""
    return e.prompt, row


@singledispatch
def sequence_of(run: Any, _e: ErrorRecord, _row: int) -> Sequenced | None:
    """Return the sequence that a row of a record belongs to; None where a program does not say its token ids."""
    raise TypeError(f"{type(run).__name__} has no tokens")


@sequence_of.register
def _(run: Run, e: ErrorRecord, row: int) -> Sequenced | None:
    return Sequenced(token_ids(run, e.prompt), row)


@sequence_of.register
def _(run: Opened, e: ErrorRecord, row: int) -> Sequenced | None:
    one = next((x for x in run.entries if x.record.phase == e.phase), None)
    if one is None or one.record.tokens is None:
        return None
    shape = next((p.shape for p in (*one.record.points, *one.record.outputs) if p.name == e.point), ())
    try:
        ids = one.tensors(e.prompt, e.step, "inputs")[str(one.record.tokens)]
    except (UserError, KeyError):
        return None
    if prod(shape[:-1]) != ids.size or row >= ids.size:
        return None
    length = ids.shape[-1] if ids.ndim else 1
    its = ids.reshape(-1, length)[row // length]
    return Sequenced({i: int(x) for i, x in enumerate(its)}, row % length)


@singledispatch
def has_tokens(run: Any) -> bool:
    """Whether a run says which tokens its rows are of."""
    raise TypeError(f"{type(run).__name__} has no tokens")


@has_tokens.register
def _(_run: Run) -> bool:
    return True


@has_tokens.register
def _(run: Opened) -> bool:
    return any(one.record.tokens is not None for one in run.entries)


@dataclass(frozen=True)
class Token:
    """A token in its context; ``ratio``: its largest forward error over that of rounding, ``at``: where.

    ``kl``: of the prediction after it from FP64's, in nats; None where its logits were not recorded.
    """

    prompt: str
    position: int
    before: str
    text: str
    after: str
    ratio: float
    at: Place
    kl: float | None


def worst_ratios(found: Comparison[Any], text: Text | None) -> list[Token]:
    """Return the tokens with the largest ratios, largest first; ``text``: makes text of ids, None: ids are shown.

    Of a program those whose ids it says.
    """
    at: dict[Hashable, tuple[float, int, ErrorRecord]] = {}
    for ratio, row, e in _ratios(found.errors):
        key = token_key(found.run, e, row)
        least = at[key][0] if key in at else min(at.values(), key=_ratio)[0] if len(at) == SHOWN else -1.0
        if ratio > least and sequence_of(found.run, e, row) is not None:
            if key not in at and len(at) == SHOWN:
                del at[min(reversed(at), key=lambda key: at[key][0])]  # of equal ones the last
            at[key] = (ratio, row, e)
    kls, tokens = _kls(found, at), []
    for key, (ratio, row, e) in sorted(at.items(), key=lambda x: -x[1][0]):
        if (its := sequence_of(found.run, e, row)) is not None:
            shown = in_context(its.ids, its.position, text)
            tokens.append(Token(e.prompt, its.position, *shown, ratio, Place.of(e), kls.get(key)))
    return tokens


def _ratio(found: tuple[float, int, ErrorRecord]) -> float:
    return found[0]


def _ratios(errors: Sequence[ErrorRecord]) -> Iterator[tuple[float, int, ErrorRecord]]:
    for e in of_kinds(errors, ForwardError):
        ratio, position = (e.scopes or {}).get("token", {}).get("ratio", (None, 0))
        if ratio is not None and not isnan(value(ratio)):
            yield value(ratio), position, e


def _kls(found: Comparison[Any], wanted: Container[Hashable]) -> dict[Hashable, float]:
    kls: dict[Hashable, float] = {}
    for e in of_kinds(found.errors, ForwardError):
        if e.distribution is not None:
            for row, kl in zip(e.distribution.positions, e.distribution.kl, strict=False):
                key = token_key(found.run, e, row)
                if key in wanted and sequence_of(found.run, e, row) is not None:  # logits of some rows count otherwise
                    kls[key] = max(kls.get(key, 0.0), value(kl))
    return kls


def in_context(ids: Mapping[int, int], position: int, text: Text | None) -> tuple[str, str, str]:
    """Return what stands before a position, its token, and what follows; ``text``: makes text of ids, None: they."""
    show = text or _ids
    back, ahead = WINDOW[text is not None]
    before = [ids[i] for i in range(max(0, position - back), position) if i in ids]
    after = [ids[i] for i in range(position + 1, position + 1 + ahead) if i in ids]
    this = _visible(show([ids[position]])) if position in ids else "?"
    return _line(show(before))[-WIDTH[0] :], this, _line(show(after))[: WIDTH[1]]


def _line(text: str) -> str:
    return text.replace("\n", "↵")


def _visible(text: str) -> str:
    """Return a token's text so that one of spaces alone, or of none, is seen."""
    return _line(text) if text.strip(" ") else "␣" * max(1, len(text))


def token_ids(run: Run, prompt: str) -> Mapping[int, int]:
    """Return the token id at every position of a prompt: its own, then those that were generated."""
    ids = dict(enumerate(run.prompts[prompt].tokens)) if prompt in run.prompts else {}
    return ids | {s.position: s.token for s in run.steps if s.prompt == prompt and s.position not in ids}


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@singledispatch
def text_of(_run: Any) -> Text | None:
    """Return what makes text of a run's ids: its model's tokenizer where that is on this machine and is the one.

    Nothing is fetched. It is the one if it makes of the ids of every prompt the text that was recorded with them.
    A program has none.
    """
    return None


@text_of.register
def _(run: Run) -> Text | None:
    from precaudit.models.checkpoints import open_checkpoint
    from precaudit.models.checkpoints.opening import recorded_source

    try:
        tokenizer = open_checkpoint(recorded_source(run.record.model.reference)).make_tokenizer()
    except UserError:
        return None

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    written = [p for p in run.prompts.values() if p.text]
    known = all(max(p.tokens, default=0) < len(tokenizer) and p.text.strip() in text(p.tokens) for p in written)
    return text if written and known else None


def quote_tokens(run: Run, ids: Iterable[int]) -> Mapping[int, str]:
    """Return each token as it is written in source, in quotes; nothing where the tokenizer is not here."""
    wanted = sorted(set(ids))
    show = text_of(run) if wanted else None
    return {} if show is None else {i: _quote(show([i])) for i in wanted}


def top_tokens(pairs: Iterable[PrefillDecodeRecord]) -> list[int]:
    """Return the tokens that lines of prefill_decode.jsonl name."""
    return [i for p in pairs for i in (p.prefill_top1, p.decode_top1, p.f64_top1) if i is not None]


def _quote(text: str) -> str:
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
