"""Which cases of a test every run has."""

import jax
import pytest

# XLA:CPU up to JAX 0.10 drops some roundings inside fusions that it keeps in 0.12
KEEPS_FEWER = jax.__version_info__ < (0, 11)


def in_turn(cases, *kept):
    """Return the cases of a test, those not kept for every run of the tests marked to run in turn (``make cuts``)."""
    return [pytest.param(c, marks=() if c in kept else pytest.mark.turn) for c in cases]


def few(cases, *kept):
    """Return the cases of a test, those not kept for every run of the tests marked slow: ``make test-all`` has all."""
    return [pytest.param(c, marks=() if c in kept else pytest.mark.slow) for c in cases]
