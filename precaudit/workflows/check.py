"""``check``: one call of a function, recorded, compared and judged in a folder that goes."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precaudit.judging.judgement import Judgement


def check(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Judgement:
    """Return the verdict on one call of ``f``: does rounding explain every value that it makes on the way.

    ``f``: any function ``jax.jit`` takes, or one that is jitted; arrays of floats with two axes and more among its
    arguments are its parameters. Raises UserError where it cannot be traced or nothing in it can be judged.

    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> x = jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16)
    >>> precaudit.check(lambda w, x: jnp.tanh(w @ x), jnp.ones((32, 32), jnp.bfloat16), x).exit_code
    0
    """
    from precaudit.judging.gate import gate
    from precaudit.recording.programs.tracing import trace_program
    from precaudit.recording.watching.programs import program_of_call
    from precaudit.references.comparison.programs import compare_program

    program = program_of_call(f, args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        run = trace_program(program, Path(folder) / program.call.__name__)
        compare_program(run, program)
        return gate(run.folder)


def assert_explained(f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless rounding explains every value that a call of ``f`` makes, as ``check`` judges it."""
    __tracebackhide__ = True
    check(f, *args, **kwargs).raise_for_failure()
