"""The programs of tests/cases, written after public bug reports and after what people run: what each has to say."""

import pytest

from tests.audited_cases import audited


@pytest.mark.parametrize("name", ["late_query.py:bug"])
def test_a_query_turned_late_is_named(name, tmp_path):
    found = audited(tmp_path, name, mapped=True)
    assert found.judgement.exit_code == 1
    first = found.diagnosis.findings[0]
    assert (first.kind, first.point) == ("semantics", "q")
    assert "position" in first.says
