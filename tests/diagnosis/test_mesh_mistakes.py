"""Mistakes of meshes in a program of one's own are named by what undoes them, and marks know values in any layout."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from precaudit.diagnosis.sameness import on_mesh
from precaudit.diagnosis.sameness.marks import in_order, known, marks
from precaudit.interpreters.jaxpr.ranks import Axes, cut_to_ranks, joined
from tests.helpers.paths import ROOT

NAMED = {
    "no sum": "sum missing",
    "half of it": "mean for sum",
    "a shard omitted": "shard omitted",
    "twice": "added twice",
    "statistics": "statistics of one shard",
    "bias": "term on each shard",
    "another rank": "shard of another rank",
}


@pytest.fixture(scope="module")
def found():
    """What tests/helpers/mesh_mistakes.py says on four devices."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.mesh_mistakes"]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", NAMED)
def test_a_mistake_on_a_mesh_is_named(found, mistake):
    assert found[mistake]["answer"] == "other"
    assert {name for name, _ in found[mistake]["causes"]} == {NAMED[mistake]}


@pytest.mark.slow
def test_a_correct_sharded_program_has_no_cause(found):
    assert found["nothing"] == {"answer": "same", "causes": []}


@pytest.mark.parametrize(
    "spec",
    [
        P("a", None),
        P(None, ("a", "b")),
        P(
            ("b", "a"),
        ),
        P(),
        P(None, "b"),
    ],
)
def test_shards_are_cut_and_joined_again(spec):
    x = jnp.arange(48.0).reshape(6, 8)
    axes = Axes(("a", "b"), (2, 2) if spec == P(None, ("a", "b")) else (3, 2) if spec != P(None, "b") else (1, 4))
    cut = cut_to_ranks(x, spec, axes, 0)
    assert cut.shape[:2] == axes.sizes
    assert (joined(cut, spec, axes, 0) == x).all()


def test_a_shard_is_the_part_that_its_rank_holds():
    x = jnp.arange(12.0).reshape(4, 3)
    cut = cut_to_ranks(x, P("b"), Axes(("a", "b"), (2, 2)), 0)
    assert (cut[0, 1] == x[2:]).all()
    assert (cut[1, 0] == x[:2]).all()


def test_a_value_is_known_in_any_layout_whole_or_in_shards():
    x = np.random.default_rng(0).standard_normal((4, 6, 8))
    known_as = in_order([marks(x, 0)])
    for held in (x.transpose(2, 0, 1).reshape(8, 24), x * (1 + 1e-13)):
        assert known(marks(held, 0), known_as).all()
    assert known(marks(x, 1), known_as).any()  # cut over four ranks
    assert known(marks(np.stack([x, x]), 1), known_as).any()  # on each of two
    parts = np.stack([x, 2 * x])
    assert not known(marks(parts, 1), known_as).any()  # parts of a sum
    assert not known(marks(x * (1 + 1e-6), 0), known_as).any()


def test_what_is_constant_or_small_has_no_marks():
    assert len(marks(np.ones((4, 5)), 0)) == 0
    assert len(marks(np.arange(4.0), 0)) == 0
    assert len(marks(np.full((4, 5), -np.inf), 0)) == 0


@pytest.mark.parametrize(("first", "found"), [(False, "all"), (True, "first")])
def test_a_cause_of_all_is_looked_for_behind_one_of_a_part(first, found, monkeypatch):
    """Thirty places on; behind a cause of all no farther than a few."""
    places = [on_mesh.Place((((n,), "", 0),), "", (f"repair {n}",)) for n in range(40)]
    one, other = (places[0], Named("first")), (places[30], Named("all"))
    named = {0: on_mesh.Candidate(first, 1, *one), 30: on_mesh.Candidate(True, 9, *other)}
    monkeypatch.setattr(on_mesh.Search, "tried", lambda _, place, __: named.get(place.keys[0][0][0]))
    search = on_mesh.Search(None, None, {}, None, None, float("inf"))
    assert search.best(places).repair.name == found


class Named(NamedTuple):
    name: str
    rank: int = 0
