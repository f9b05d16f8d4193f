"""Where the files of the repository lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "helpers" / "cases"
EXAMPLES = ROOT / "examples"
FIXTURES = ROOT / "refs" / "fixtures"
