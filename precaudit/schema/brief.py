"""What a session shows of a value: a few lines instead of all it holds."""

from importlib import import_module

# By name: how a value looks is the reports' to say, which stand above the values (ARCHITECTURE.md).
CARDS = "precaudit.reports.cards"


class Brief:
    """Base of what may hold thousands of records or tensors: ``repr`` is ten lines at most, a table in notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        try:
            return str(import_module(CARDS).card_text(self))
        except AttributeError:  # a debugger asks while a subclass is being made
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        return str(import_module(CARDS).card_table(self))
