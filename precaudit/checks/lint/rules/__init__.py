"""One rule a file: ``RULE``, and the function that finds where it fires."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from precaudit.checks.lint.rule import Rule


@cache
def every() -> tuple[Rule, ...]:
    """Return all rules, by name."""
    modules = [import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)]
    return tuple(sorted((m.RULE for m in modules), key=lambda rule: rule.id))
