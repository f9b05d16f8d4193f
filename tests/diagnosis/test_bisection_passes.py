"""Passes of XLA: which changed a program, which can be omitted together, and what a compiled line becomes without."""

from pathlib import Path

import jax
import jax.numpy as jnp

from precaudit.diagnosis.bisection.compiled import hlo_rows, program_order
from precaudit.diagnosis.bisection.passes import PassSides, most_together, passes_in
from precaudit.interpreters.tpu.texts import hlo_text
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.schema.places import Place
from precaudit.schema.records.errors import PairError


def test_the_passes_that_changed_a_module_are_read_from_the_names_of_xla_s_files():
    names = [
        "module_0004.jit_f.0006.simplification.after_pipeline-start.before_algsimp.txt",
        "module_0004.jit_f.0007.simplification.after_algsimp.before_simplify-sorts.txt",
        "module_0004.jit_f.0021.HLO_passes.after_simplification.before_select.txt",
        "module_0004.jit_f.0035.copy-insertion.after_removing_unnecessary_copies.txt",
        "module_0004.jit_f.0036.HLO_passes.after_dot-library-rewriter.before_pipeline-end.txt",
    ]
    assert passes_in([Path(n) for n in names]) == ("algsimp", "dot-library-rewriter")


def test_names_that_hold_together_are_found_past_those_that_do_not():
    asked = []

    def holds(some):
        asked.append(tuple(some))
        return "c" not in some and not {"e", "g"} <= set(some)

    assert most_together("abcdefgh", holds) == ("a", "b", "d", "e", "f", "h")
    assert len(asked) <= 15


def test_a_change_leaves_a_pass_out_or_takes_one_in():
    for sides, changes, said in (
        (PassSides(("a", "b", "c"), True), ("without b",), "=b"),
        (PassSides(("a", "b", "c"), False), ("with b",), "=a,c"),
        (PassSides(("a", "b"), True), (), ""),
    ):
        with sides.site(changes) as site:
            assert site.variables["XLA_FLAGS"].endswith(said)
            assert ("disable_hlo_passes" in site.variables["XLA_FLAGS"]) == (said != "")


def test_records_of_a_program_are_in_the_order_in_which_it_makes_them():
    made = {"stacked": (3,), "shape": (4,), "dtype": "float32", "source": "", "scope": "", "primitive": "mul"}
    points = [ProgramPoint(name=n, **made | ({} if n in "bc" else {"stacked": ()})) for n in "abcd"]
    held = {"call": {p.name: p for p in points}}
    order = [(0, None, "a"), (0, 0, "b"), (0, 0, "c"), (0, 1, "b"), (0, 2, "c"), (0, None, "d"), (1, None, "a")]
    each = [Place("p", "call", step, layer, name).record(PairError, "x", "y") for step, layer, name in order]
    backwards = each[::-1]
    assert sorted(backwards, key=lambda e: program_order(e, held)) == each


def test_a_compiled_line_is_told_apart_where_a_pass_was_left_out():
    def f(x):
        y = jnp.sin(x)
        return y / 3.0

    lowered = jax.jit(f).lower(jnp.ones(8, jnp.float32))
    options = ({}, {"xla_disable_hlo_passes": "algsimp"})
    texts = [[hlo_text(lowered.compile(compiler_options=o))] for o in options]
    line = f"{Path(__file__).name}:{f.__code__.co_firstlineno + 2}"
    found = {x.what: (x.good, x.bad) for x in hlo_rows(*texts, line)}
    assert found["divide f32 of f32"] == (0, 1)
    assert found["multiply f32 of f32"] == (1, 0)
    assert "f32 3" in "; ".join(x.what for x in hlo_rows(*texts, ""))  # what it is divided by
    assert hlo_rows(*texts, "elsewhere.py:1") == hlo_rows(*texts, "")
    assert hlo_rows(texts[0], texts[0], line) == ()
    assert "sine f32 of f32" not in found
