"""What token ids say, where the run's tokenizer is here; and the tokens whose errors are largest, in their context."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from precaudit.errors import UserError
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


@dataclass(frozen=True)
class Token:
    """A token in its context; ``ratio``: its largest forward error over an emulated policy's, ``at``: where.

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


def worst_ratios(found: Comparison[Run], text: Text | None) -> list[Token]:
    """Return the tokens with the largest ratios, largest first; ``text``: makes text of ids, None: ids are shown."""
    at: dict[tuple[str, int], tuple[float, ErrorRecord]] = {}
    for ratio, position, e in _ratios(found.errors):
        key = (e.prompt, position)
        if key in at:
            at[key] = max(at[key], (ratio, e), key=_ratio)
        elif len(at) < SHOWN or ratio > min(at.values(), key=_ratio)[0]:
            at[key] = (ratio, e)
            if len(at) > SHOWN:
                del at[min(reversed(at), key=lambda key: at[key][0])]  # of equal ones the last
    kls = _kls(found.errors, at)
    return [_token(found.run, key, *at[key], kls.get(key), text) for key in sorted(at, key=lambda key: -at[key][0])]


def _ratio(found: tuple[float, ErrorRecord]) -> float:
    return found[0]


def _ratios(errors: Sequence[ErrorRecord]) -> Iterator[tuple[float, int, ErrorRecord]]:
    for e in of_kinds(errors, ForwardError):
        ratio, position = (e.scopes or {}).get("token", {}).get("ratio", (None, 0))
        if ratio is not None and not isnan(value(ratio)):
            yield value(ratio), position, e


def _kls(errors: Sequence[ErrorRecord], wanted: Container[tuple[str, int]]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for e in of_kinds(errors, ForwardError):
        if e.distribution is not None:
            for position, kl in zip(e.distribution.positions, e.distribution.kl, strict=False):
                if (key := (e.prompt, position)) in wanted:
                    found[key] = max(found.get(key, 0.0), value(kl))
    return found


def _token(run: Run, key: tuple[str, int], ratio: float, e: ErrorRecord, kl: float | None, text: Text | None) -> Token:
    prompt, position = key
    return Token(prompt, position, *in_context(token_ids(run, prompt), position, text), ratio, Place.of(e), kl)


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


def text_of(run: Run) -> Text | None:
    """Return what makes text of the run's ids: its model's tokenizer where that is on this machine and is the one.

    Nothing is fetched. It is the one if it makes of the ids of every prompt the text that was recorded with them.
    """
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
