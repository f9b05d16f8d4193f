"""Which calls of a run hold some positions: of a model by the tokens' places, of a program by the calls' numbers."""

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache, singledispatch
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
    steps = run.record.requested.decode_steps
    each = [("prefill", 0), ("rescore", 0), *(("decode", step) for step in range(steps + 1))]
    lengths = {prompt: len(its.tokens) for prompt, its in run.prompts.items()}
    return calls_of_tokens([(p, *call, n, steps) for p, n in lengths.items() for call in each], positions)


def calls_of_tokens(calls: Iterable[tuple[str, str, int, int, int]], positions: str) -> Calls:
    """Return which calls (prompt, phase, step, length of the prompt, decode steps) hold one of the positions.

    Prefill holds the prompt, decode step s the position n - 1 + s, and rescore those of every decode step.
    """
    chosen = cache(lambda n: parse_positions(positions, n))  # ascending
    found = set()
    for prompt, phase, step, n, steps in calls:
        rows = {"prefill": range(n), "decode": range(n - 1 + step, n + step), "rescore": range(n - 1, n + steps)}
        held = rows.get(phase, range(0))
        at = bisect_left(chosen(n + steps), held.start)
        if at < len(chosen(n + steps)) and chosen(n + steps)[at] in held:
            found.add((prompt, phase, step))
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
