"""Programs of one's own that lie on several devices, recorded as on chips of a TPU that are not here."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.tag import tag_program
from tests.helpers.paths import ROOT
from tests.helpers.tpus import needs_libtpu

WAYS = ("arguments", "inner jit", "types", "psum", "no psum")
BY_FOUR = {"product.1": [4, "bfloat16"]}  # rounded with every chip


def recorded(folder, *names):
    """Return what tests/helpers/on_predicted_chips.py says of programs on eight devices of this host."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.on_predicted_chips", str(folder), *names]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@needs_libtpu
@pytest.mark.slow
def test_a_program_cut_by_constraints_adds_in_bfloat16_and_passes(tmp_path):
    found = recorded(tmp_path, "constraints", "two meshes", "eight")
    passed = found["constraints"]
    assert (passed["split"], passed["same"], passed["failed"]) == (BY_FOUR, True, [])
    assert passed["counts"] == {"pass": 9}
    assert passed["notes"] == ["compiled for as many chips of v5e:2x2 as its mesh has devices: model=4"]
    two, eight = found["two meshes"], found["eight"]
    assert two["refused"].startswith("the program names several meshes, model=4 and data=2,model=2: ")
    assert eight["refused"] == "v5e:2x2 has 4 chips, not 8"
    assert not two["folder"]
    assert not eight["folder"]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Programs of the other forms of sharding."""
    return recorded(tmp_path_factory.mktemp("chips"), *WAYS)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS[:-1])
def test_every_form_of_sharding_passes(others, name):
    found = others[name]
    assert set(found["counts"]) == {"pass"}
    assert found["same"]
    assert found["split"] == ({} if name == "psum" else BY_FOUR)  # a psum of the program's own names what it adds


@needs_libtpu
@pytest.mark.slow
def test_a_missing_sum_is_flagged_by_a_formula(others):
    assert others["psum"]["failed"] == []
    assert others["no psum"]["failed"] == ["outputs.out"]


def test_taps_leave_the_shardings_of_an_inner_jit():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    inner = jax.jit(lambda x: x @ x, in_shardings=rows, out_shardings=whole)
    made = tag_program(lambda _, x: inner(x) + 1, (), jnp.ones((2, 2)))
    equations = walk_equations(jax.make_jaxpr(made.call)((), jnp.ones((2, 2))).jaxpr)
    assert [e.params["sharding"].spec for e in equations if e.primitive.name == "sharding_constraint"] == [
        P("x"),
        P(),
    ]
