"""The programs of tests/cases, written after public bug reports and after what people run: what each has to say."""

import pytest

from precaudit.gradients.check import gradcheck
from precaudit.gradients.subjects import named
from tests.audited_cases import CASES, audited


@pytest.mark.parametrize("name", ["late_query.py:bug"])
def test_a_query_turned_late_is_named(name, tmp_path):
    found = audited(tmp_path, name, mapped=True)
    assert found.judgement.exit_code == 1
    first = found.diagnosis.findings[0]
    assert (first.kind, first.point) == ("semantics", "q")
    assert "position" in first.says


def line_of(file, text):
    """Return ``FILE:LINE`` of the first line of a case that holds a text."""
    lines = (CASES / file).read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}:"


def held_to_reference(kernel, given="inputs", **how):
    """Return what gradcheck finds of a case, the reference and inputs beside it or beside the file named first."""
    file = f"{CASES}/{how.pop('beside', kernel.partition(':')[0])}"
    it = named(f"{CASES}/{kernel}", f"{file}:reference", f"{file}:{given}", None)
    return gradcheck(it.kernel, it.reference, it.inputs, argnums=it.argnums, **({"hostile": False, "seeds": 1} | how))


@pytest.mark.parametrize("name", ["kernel", "wrapped"])
def test_a_rounding_in_a_backward_rule_is_told_by_its_own_line(name):
    found = held_to_reference(f"custom_vjp.py:{name}")
    assert found.exit_code == 1
    assert f"explains it: tests/cases/{line_of('custom_vjp.py', 'narrow = ')}" in found.conclusions[0]
