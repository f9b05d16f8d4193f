"""Which calls of a run hold some positions: of a model by the tokens' places, of a program by the calls' numbers."""

from functools import singledispatch
from typing import Any

from precaudit.errors import UserError
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.schema.selection import parse_positions

Calls = frozenset[tuple[str, str, int]]  # (prompt or case, phase of records, step)


@singledispatch
def calls_at(run: Any, _positions: str) -> Calls:
    """Return the calls that hold one of the positions that ``"last:4,0:2"`` names; raises UserError where none does."""
    raise TypeError(f"{type(run).__name__} has no calls")


@calls_at.register
def _(run: Run, positions: str) -> Calls:
    """Prefill holds the prompt, decode step s the position n - 1 + s, and rescore those of every decode step."""
    steps = run.record.requested.decode_steps
    found = set()
    for prompt, its in run.prompts.items():
        n = len(its.tokens)
        chosen = set(parse_positions(positions, n + steps))
        found |= {(prompt, "decode", s) for s in range(steps + 1) if n - 1 + s in chosen}
        found |= {(prompt, "prefill", 0)} if chosen & set(range(n)) else set()
        found |= {(prompt, "rescore", 0)} if chosen & set(range(n - 1, n + steps)) else set()
    return _some(found, positions)


@calls_at.register
def _(run: Opened, positions: str) -> Calls:
    found = set()
    for one in run.entries:
        r = one.record
        chosen = set(parse_positions(positions, r.began + r.calls))
        found |= {(case, r.phase, i) for case in r.cases for i in range(r.calls) if r.began + i in chosen}
    return _some(found, positions)


def _some(found: set[tuple[str, str, int]], positions: str) -> Calls:
    if not found:
        raise UserError(f"--positions {positions} name none of what the run holds")
    return frozenset(found)
