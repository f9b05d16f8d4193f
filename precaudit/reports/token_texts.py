"""What token ids say, where the model's tokenizer is at hand."""

from collections.abc import Iterable, Mapping

from precaudit.checkpoints.opening import open_checkpoint, recorded_source
from precaudit.errors import UserError
from precaudit.records import ModelRecord, PrefillDecodeRecord

LONGEST = 16  # characters of a token that are shown


def texts(model: ModelRecord, ids: Iterable[int]) -> Mapping[int, str]:
    """Return each token as it is written in source, quoted; nothing where the tokenizer is not here.

    Nothing is fetched: a run may be someone else's.
    """
    wanted = sorted(set(ids))
    if not wanted:
        return {}
    try:
        tokenizer = open_checkpoint(recorded_source(model.reference), model.allowed).make_tokenizer()
        return {i: _quoted(tokenizer.decode([i])) for i in wanted}
    except (UserError, OSError):
        return {}


def top_tokens(pairs: Iterable[PrefillDecodeRecord]) -> list[int]:
    """Return the tokens that lines of prefill_decode.jsonl name."""
    return [i for p in pairs for i in (p.prefill_top1, p.decode_top1, p.f64_top1) if i is not None]


def _quoted(text: str) -> str:
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
