"""One run of two processes: the tests of it, each a row (``tests/recording/test_two_processes.py``)."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

FILE = "tests/recording/test_two_processes.py"


def run_tests() -> Iterator[tuple[str, bool, str]]:
    """Yield every test's name in words, whether it passed, and what it says where it did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = ("-q", "-p", "no:cacheprovider", "-m", "slow or not slow", f"--junitxml={report}")
        done = subprocess.run([sys.executable, "-m", "pytest", *options, FILE], capture_output=True, text=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    for case in cases:
        bad = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        yield name, bad is None, "passes" if bad is None else f"{bad.tag}: {(bad.get('message') or '').splitlines()[0]}"
    if not cases:
        yield FILE, False, f"pytest's exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-150:]}"
