"""compared.json: what ``compare`` says of the records that it wrote beside a program's run."""

import msgspec

from precaudit.schema.records.base import Record


class Unpaired(Record, frozen=True, omit_defaults=False):
    """An entry point of a case whose positions could be held against no other entry point's, and why."""

    case: str
    phase: str
    why: str


class Compared(Record, frozen=True, omit_defaults=False):
    """compared.json: which run the error records beside it are of, and their hash.

    ``names``: the textbook that formula records are against, as ``Names`` has it; ``told``: what these rest on.
    ``accum``: formats that sums of products were made in, too. ``pairs``: the hash of prefill_decode.jsonl, where the
    entry points see positions twice; ``unpaired``: what of them could not be held against another.
    """

    run: str
    errors: str
    names: dict[str, str] = msgspec.field(default_factory=dict)
    told: tuple[str, ...] = ()
    accum: tuple[str, ...] = ()
    pairs: str = ""
    unpaired: tuple[Unpaired, ...] = ()
