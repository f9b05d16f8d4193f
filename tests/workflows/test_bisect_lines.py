"""Bisections by the lines of a program: the line whose rounding does it, alone or with another."""

import json

import pytest

from precaudit.cli import run

PROGRAM = """\
import jax.numpy as jnp
import numpy as np

from precaudit import Program


def call(params, x):
    a = jnp.dot(x, params)
    b = jnp.dot(a.astype({second}), params.astype({second}))
    c = jnp.dot(b.astype(jnp.float16), params)
    d = jnp.dot(c.astype({third}), params.astype({third}))
    return jnp.dot(d.astype(jnp.float16), params, preferred_element_type=jnp.float32)


DRAW = np.random.default_rng(0)
x, w = (jnp.asarray(DRAW.standard_normal((n, 32)) / 32**0.5, jnp.float16) for n in (64, 32))
program = Program(call, w, {{"a": (x,)}}, outputs="y")
"""


def bisect(tmp_path, second, third, *given):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.format(second=second, third=third))
    given = ["bisect", f"{path}:program", "--by", "lines", "-o", str(tmp_path / "out"), *given]
    code = run(given)
    found = tmp_path / "out" / "bisect.json"
    return code, json.loads(found.read_text()) if found.is_file() else None


def test_the_line_that_rounds_to_bfloat16_among_float16_is_found(tmp_path):
    code, found = bisect(tmp_path, "jnp.bfloat16", "jnp.float16", "--test", "forward@outputs.y<1e-3")
    assert code == 0
    assert (found["sets"], found["proof"]) == ([["mine.py:9"]], "smallest")
    assert len(found["asked"]["changes"]) >= 4


def test_the_lines_that_have_to_be_float32_are_the_cure(tmp_path):
    given = ["--test", "forward@outputs.y<1e-3", "--find", "cure"]
    code, found = bisect(tmp_path, "jnp.bfloat16", "jnp.bfloat16", *given)
    assert code == 0
    assert found["sets"] == [["mine.py:9", "mine.py:11"]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--test", "bits"], "trials measure forward@outputs.y"), (["--test", "kl<1", "--bad", "x"], "takes no --bad"),
        (["--test", "forward@outputs.y<9"], "is good already"),
    ],
)  # fmt: skip
def test_what_lines_do_not_tell_is_refused(tmp_path, capsys, given, says):
    code, _ = bisect(tmp_path, "jnp.bfloat16", "jnp.float16", *given)
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_program_that_rounds_nothing_has_nothing_to_bisect(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.replace("jnp.float16", "jnp.float32").format(second="jnp.float32", third="jnp.float32"))
    given = ["bisect", f"{path}:program", "--by", "lines", "--test", "kl<1", "-o", str(tmp_path / "out")]
    assert run(given) == 2
    assert "no line of it rounds" in capsys.readouterr().err


def test_a_model_has_no_lines_of_yours(tmp_path, capsys):
    assert run(["bisect", "tiny", "--by", "lines", "--test", "kl<1", "-o", str(tmp_path / "out")]) == 2
    assert "is no program of yours" in capsys.readouterr().err
