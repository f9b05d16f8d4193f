"""JUnit XML: one test case a layer and point, with what was found there; a history of runs lines up by name."""

from types import MappingProxyType

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from precaudit.judging.judgement import Judgement
from precaudit.reports.escaping import xml
from precaudit.reports.findings import Causes
from precaudit.reports.judgement import Group, group_verdicts, rest, verdict_message

WHOLE = "run"  # the case of verdicts on the whole run: a prompt, a baseline
FOUND = {"fail": Failure, "nonfinite": Failure, "input suspect": Skipped, "not run": Skipped}


def render_junit(j: Judgement, causes: Causes = MappingProxyType({})) -> str:
    """Return the judgement as JUnit XML: fail and nonfinite are failures, missing, stale and unknown errors.

    ``causes``: what diagnose found, by layer and point: the text of that place's first failure.

    Names hold no number, prompt or count; those of layers and points that pass are there, too.
    """
    found: dict[tuple[int | None, str], list[Group]] = {place: [] for place in ((None, ""), *j.places)}
    found |= group_verdicts(j.verdicts, lambda v: (v.layer, v.point))
    suite = TestSuite("precaudit")
    suite.add_property("run", xml(j.name))
    for (layer, point), its in found.items():
        suite.add_testcase(_case(layer, point, its, "\n".join(causes.get((layer, point), ()))))
    whole = JUnitXml()
    whole.add_testsuite(suite)
    written: bytes = whole.tostring()  # type: ignore[no-untyped-call]
    return written.decode()


def _case(layer: int | None, point: str, its: list[Group], cause: str) -> TestCase:
    """Return the case of a place with a result for each group of verdicts on it."""
    name = (point or WHOLE) if layer is None else f"layer {layer} {point}"
    case = TestCase(xml(name), "precaudit")
    results = [FOUND.get(g.first.status, Error)(xml(verdict_message(g.first) + rest(g)), g.first.status) for g in its]
    if results and cause:
        results[0].text = xml(cause)
    case.result = results
    return case
