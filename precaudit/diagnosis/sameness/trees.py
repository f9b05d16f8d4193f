"""Named outputs that are trees of arrays, such as gradients: told by their arrays, ``grads.w``."""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from precaudit.recording.programs.program import Entry, Program


def with_leaves(program: Program, entry: str) -> Program:
    """Return a program whose named outputs that are trees are its arrays', by name; as it is where none is a tree.

    Of the entry point that is looked at, if nothing goes on from it: what a next call is given is its state, which two
    programs of one formula may hold otherwise.
    """
    names = program.outputs
    if entry != program.entry or program.then or program.advance is not None or names is None:
        return program
    every = (names,) if isinstance(names, str) else tuple(names)

    def parts(out: Any) -> list[tuple[str, Any]]:
        each = (out,) if isinstance(names, str) else out
        found = []
        for name, x in zip(every, each, strict=True):
            for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
                below = jax.tree_util.keystr(path, simple=True, separator=".")
                found.append((f"{name}.{below}" if below else name, leaf))
        return found

    try:
        shape = jax.eval_shape(program.call, program.params, *next(iter(program.cases.values())))
    except Exception:  # the user's code: what it says is told where it is traced
        return program
    if not isinstance(names, str) and not (isinstance(shape, tuple | list) and len(shape) == len(every)):
        return program  # which is refused where it is traced
    told = tuple(name for name, _ in parts(shape))
    if told == every:
        return program
    return program.altered(call=lambda *given: tuple(x for _, x in parts(program.call(*given))), outputs=told)


def outputs_left_out(programs: Sequence[Program], entries: Sequence[str], seen: Collection[str]) -> tuple[str, ...]:
    """Return the outputs, or arrays of trees, that are compared in no part though both programs name them so.

    State, what is no float, and what one tree holds and the other does not. ``seen``: what is compared.
    """
    each = [_names(p if e == p.entry else p.then[e]) for p, e in zip(programs, entries, strict=True)]
    both = {n.partition(".")[0] for n in each[0]} & {n.partition(".")[0] for n in each[1]}
    every = dict.fromkeys(n for names in each for n in names if n.partition(".")[0] in both)
    return tuple(n for n in every if n not in seen and not any(x.startswith(f"{n}.") for x in every))


def _names(of: Program | Entry) -> tuple[str, ...]:
    return () if of.outputs is None else (of.outputs,) if isinstance(of.outputs, str) else tuple(of.outputs)
