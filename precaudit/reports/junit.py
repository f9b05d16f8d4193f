"""JUnit XML: one test case a group of verdicts, and one for all that pass."""

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from precaudit.judging.gate import Judgement
from precaudit.reports.escaping import xml
from precaudit.reports.judgement import groups, message, place_text_of, rest


def render(j: Judgement) -> str:
    """Return the judgement as JUnit XML: fail and nonfinite are failures, missing, stale and unknown errors."""
    suite = TestSuite(xml(f"precaudit {j.name}"))
    for g in groups(j.verdicts):
        v = g.first
        case = TestCase(
            xml(f"{place_text_of(v) or v.status} {v.kind}".strip()), xml(f"precaudit.{v.kind}.{v.point or 'run'}")
        )
        text = xml(message(v) + rest(g))
        if v.status in ("fail", "nonfinite"):
            case.result = [Failure(text, v.status)]
        elif v.status in ("input suspect", "not run"):
            case.result = [Skipped(text, v.status)]
        else:
            case.result = [Error(text, v.status)]
        suite.add_testcase(case)
    passed = j.counts.get("pass", 0)
    if passed:
        suite.add_testcase(TestCase(f"{passed} records pass", "precaudit"))
    whole = JUnitXml()
    whole.add_testsuite(suite)
    written: bytes = whole.tostring()  # type: ignore[no-untyped-call]
    return written.decode()
