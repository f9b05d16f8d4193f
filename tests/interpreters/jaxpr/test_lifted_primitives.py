"""Every primitive of this JAX is lifted rightly or refused by name."""

import importlib
import pkgutil
import re
import sys

import jax
import jax._src
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from precaudit.interpreters.jaxpr import CannotLift, shadow
from precaudit.interpreters.jaxpr.primitives import TABLE, primitives_page
from tests.helpers.paths import ROOT
from tests.helpers.primitive_cases import CASES, inside

DOCS = ROOT / "docs"
SYNTHETIC = ("call", "closed_call")  # only JAX itself makes them


def every_primitive():
    """Return the names of all primitives of jax.lax and of what JAX is made of."""
    for package in ("jax._src.lax", "jax._src.random", "jax._src.state"):
        found = importlib.import_module(package)
        for info in pkgutil.iter_modules(getattr(found, "__path__", ()), f"{package}."):
            importlib.import_module(info.name)
    for name in ("shard_map", "ad_checkpoint", "custom_batching", "hijax", "export.shape_poly", "cudnn.fusion"):
        importlib.import_module(f"jax._src.{name}")
    loaded = [(n, m) for n, m in list(sys.modules.items()) if n.partition(".")[0] == "jax" and m is not None]
    modules = [m for n, m in loaded if "pallas" not in n]  # those of kernels, which a program holds inside pallas_call
    return {p.name for m in modules for k, p in vars(m).items() if k.endswith("_p") and isinstance(p, Primitive)}


def test_the_table_has_every_primitive_of_this_jax():
    assert every_primitive() - set(TABLE) == set()
    assert len(every_primitive()) > 200


def test_every_lifted_primitive_has_a_case():
    assert {n for n, how in TABLE.items() if how.kind != "refused"} == {*CASES, *SYNTHETIC}


def lifted_up(x):
    return jnp.asarray(x.astype({"f": np.float64, "c": np.complex128}.get(x.dtype.kind, x.dtype)))


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_lifted_primitive_is_the_program_in_64_bits(name):
    """The same program, traced with 64-bit types and given 64-bit operands, from start to end."""
    if name not in every_primitive():
        pytest.skip(f"this JAX has no {name}")
    f, operands = CASES[name]
    with jax.numpy_dtype_promotion("standard"):
        assert name in set(inside(jax.make_jaxpr(f)(*operands).jaxpr))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found, wanted = jax.tree.leaves(shadow(f)(*operands)), jax.tree.leaves(f(*map(lifted_up, operands)))
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12)


def synthetic(name):
    """Return a primitive of a name that gives its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda _context, x, **_: [x])
    return primitive


def refused_names():
    return [*sorted(n for n, how in TABLE.items() if how.kind == "refused"), "unknown_to_the_table"]


@pytest.mark.parametrize("name", refused_names())
def test_a_refused_primitive_is_refused_by_name_and_line(name):
    primitive = synthetic(name)
    with jax.enable_x64(True), pytest.raises(CannotLift, match=f"--lift {re.escape(name)}=module:function") as error:
        shadow(lambda x: primitive.bind(x) * 2)(np.ones(3, np.float32))
    assert error.value.name == name
    assert "test_lifted_primitives.py:" in str(error.value)
    assert error.value.why == (TABLE[name].why if name in TABLE else "this version of precaudit does not know it")


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_call_only_jax_makes_is_entered(name):
    primitive = synthetic(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, **_: [x])
    body = jax.make_jaxpr(lambda x: x * 3)(np.float32(1))
    with jax.enable_x64(True):
        out = shadow(lambda x: primitive.bind(x, call_jaxpr=body)[0])(np.float32(0.1))
    assert float(out) == 3 * float(np.float32(0.1))


def test_the_table_in_the_documents_is_current():
    assert (DOCS / "shadow.md").read_text() == primitives_page(), "make schemas"
    assert "(shadow.md)" in (DOCS / "limits.md").read_text()
