"""A program's own taps beside automatic ones, alone, or left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import precaudit
from precaudit import Program
from precaudit.errors import UserError
from precaudit.recording.programs.planning import points

DRAW = np.random.default_rng(0)
W = jnp.asarray(DRAW.standard_normal((8, 8)) / 3, jnp.bfloat16)
X = jnp.asarray(DRAW.standard_normal((4, 8)), jnp.bfloat16)


def two(w, x):
    """A product whose variable has the name of a tap, one that is tapped itself, and one after both."""
    mine = x @ w
    hidden = checkpoint_name(jnp.einsum("td,df->tf", jax.nn.relu(mine), w), "mine")
    return hidden @ w


PROGRAM = Program(two, W, {"a": (X,)})


def names(program, taps):
    return [p.name for p in points(program, taps)]


def test_own_taps_keep_their_names_and_add_to_automatic_ones():
    found = points(PROGRAM, "both")
    assert next(p.name for p in found if p.name != "mine") == "mine~1"
    (own,) = [p for p in found if p.name == "mine"]
    assert own.primitive == "name"
    assert own.source.startswith("test_own_taps.py:")
    assert names(PROGRAM, "own") == ["mine"]
    assert len(names(PROGRAM, "automatic")) == len(found)  # the tapped product is recorded once
    assert "name" not in {p.primitive for p in points(PROGRAM, "automatic")}


def test_a_function_called_twice_keeps_its_automatic_point_where_one_result_alone_is_tapped():
    product = jax.jit(lambda x, w: x @ w)

    def call(w, x):
        return product(checkpoint_name(product(x, w), "mine"), w)

    def both(w, x):
        return checkpoint_name(product(checkpoint_name(product(x, w), "mine"), w), "mine")

    def made(function):
        return [p.primitive for p in points(Program(function, W, {"a": (X,)}), "both") if p.primitive != "argument"]

    assert made(call) == ["dot_general", "name", "dot_general"]
    assert made(both) == ["name", "name"]


@pytest.mark.parametrize("taps", ["both", "own", "automatic"])
def test_runs_say_which_they_hold_and_are_compared_so(taps, tmp_path):
    opened = precaudit.trace(PROGRAM, tmp_path / "run", taps=taps)
    assert opened.record.taps == taps
    assert opened.record.automatic == (taps == "automatic")
    precaudit.compare(opened, program=PROGRAM)
    assert set(precaudit.gate(tmp_path / "run").counts) == {"pass"}


def test_what_is_asked_for_wrongly_is_told():
    bare = Program(lambda w, x: x @ w, W, {"a": (X,)})
    with pytest.raises(UserError, match="--taps own: the program has no checkpoint_name taps"):
        points(bare, "own")
    with pytest.raises(UserError, match="did you mean 'automatic'"):
        points(bare, "automatc")
    with pytest.raises(UserError, match="'mine' is the program's own"):
        points(Program(two, W, {"a": (X,)}, points={"other": "mine"}), "both")
    with pytest.raises(UserError, match="another point of that name"):
        points(Program(two, W, {"a": (X,)}, points={"mine": "two"}), "both")
