"""The pytest plugin: the fixture ``precaudit_gate`` and the option for its budgets. Imports nothing heavy at start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--precaudit-budgets``."""
    group = parser.getgroup("precaudit", "numerical precision audit")
    group.addoption(
        "--precaudit-budgets", metavar="PATH", default=None, help="budgets that the fixture precaudit_gate judges by"
    )


@pytest.fixture(scope="session")
def precaudit_gate(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return ``assert_within_budget``, judging by the budgets of ``--precaudit-budgets`` where a test states none."""
    from precaudit.workflows.assertions import assert_within_budget

    stated = request.config.getoption("--precaudit-budgets")
    default = None if stated is None else Path(request.config.invocation_params.dir, stated)

    def gate_run(run: Any, budgets: Path | str | None = None, baseline: Path | str | None = None) -> None:
        __tracebackhide__ = True
        assert_within_budget(run, default if budgets is None else budgets, baseline)

    return gate_run
