"""Measure what counting the calls of a jitted function adds to a call, against a decode step of 5 ms.

Calls of the function as it is and as ``precaudit watch`` has it take turns. Run: python -m benchmarks.watching
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.main_job import Line, show
from precaudit.recording.watching.calls import Picked, Watch

STEP, BOUND = 5e-3, 2.0  # seconds, % of them
CALLS, ROUNDS = 500, 9


def seconds(f: Any, *given: Any) -> float:
    """Return the seconds of a call until it comes back."""
    began = time.perf_counter()
    for _ in range(CALLS):
        f(*given)
    return (time.perf_counter() - began) / CALLS


def added(leaves: int) -> Line:
    """Return what is added to a call with so many arrays among its arguments."""

    def first(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return x + params[0][0]

    params, x = [jnp.ones(8)] * leaves, jnp.ones(8)
    plain, watch = jax.jit(first), Watch(Picked())
    watch.put_into(jax)
    watched = jax.jit(first)
    watch.original, original = {}, watch.original
    for name, own in original.items():
        setattr(jax, name, own)
    for f in (plain, watched):
        f(params, x)
    rounds = [(seconds(plain, params, x), seconds(watched, params, x)) for _ in range(ROUNDS)]
    more = median(b - a for a, b in rounds)
    note = f"{1e6 * more:.0f} µs more than {1e6 * median(a for a, _ in rounds):.0f}"
    return Line(f"counting a call with {leaves} arrays, of a step of 5 ms", 100 * more / STEP, "%", BOUND, note=note)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    show([added(10), added(100), added(1000)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
