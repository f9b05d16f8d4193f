"""Named outputs that are trees of arrays, such as gradients: their arrays are compared, ``grads.w``, state is not."""

from collections.abc import Collection, Sequence

import jax

from precaudit.recording.programs.program import OUTPUT, Entry, Program


def output_names(program: Program, entry: str) -> tuple[str, ...]:
    """Return the names of the arrays that an entry point's outputs are; of state the names of its trees.

    What a next call or entry point is given is its state, which two programs of one formula may hold otherwise.
    """
    if entry != program.entry or program.then or program.advance is not None:
        return _names(program if entry == program.entry else program.then[entry])
    out = jax.eval_shape(program.call, program.params, *next(iter(program.cases.values())))
    return tuple(name.removeprefix(OUTPUT) for name in program.every_output(out))


def outputs_left_out(names: Sequence[Sequence[str]], seen: Collection[str]) -> tuple[str, ...]:
    """Return the outputs, or arrays of trees, that are compared in no part though both programs name them so.

    State, what is no float, and what one tree holds and the other does not. ``names``: of each program,
    ``seen``: what is compared.
    """
    both = {n.partition(".")[0] for n in names[0]} & {n.partition(".")[0] for n in names[1]}
    every = dict.fromkeys(n for each in names for n in each if n.partition(".")[0] in both)
    return tuple(n for n in every if n not in seen and not any(x.startswith(f"{n}.") for x in every))


def _names(of: Program | Entry) -> tuple[str, ...]:
    return () if of.outputs is None else (of.outputs,) if isinstance(of.outputs, str) else tuple(of.outputs)
