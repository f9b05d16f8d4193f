"""What the source of the package shows: headings of tables and sections, and notes, as its own calls have them."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.helpers.paths import ROOT

PLACES = {"Table": 1, "Section": 0}  # which argument holds the columns, the heading
HELD = (ast.Tuple, ast.List, ast.Starred, ast.Subscript, ast.BinOp, ast.IfExp, ast.Dict)
Names = dict[str, list[ast.expr]]


def heading_texts() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every constant heading of a column or section."""
    for name, every in _sources():
        names: Names = {}
        for node in every:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                names.setdefault(getattr(target, "id", ""), []).append(node.value)
        for node in every:
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                for argument in node.args[PLACES[called] :][:1] if called in PLACES else ():
                    yield from ((name, text.strip()) for text in _texts(argument, dict(names)) if text.strip())


def note_texts() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every note, x for what is put in."""
    for name, every in _sources():
        for node in every:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts]
            if values and values[0].startswith("note: "):
                yield name, "".join(values)


@cache
def _sources() -> list[tuple[str, list[ast.AST]]]:
    files = sorted((ROOT / "precaudit").rglob("*.py"))
    return [(path.name, list(ast.walk(ast.parse(path.read_text())))) for path in files]


def _texts(node: ast.AST, names: Names) -> Iterator[str]:
    """Yield the constant texts of an expression, and of what its names are assigned."""
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.Name):
        for assigned in names.pop(node.id, ()):
            yield from _texts(assigned, names)
    elif isinstance(node, HELD):
        keys = [getattr(node, "slice", None), getattr(node, "test", None), *getattr(node, "keys", ())]
        for child in ast.iter_child_nodes(node):
            if child not in keys:
                yield from _texts(child, names)
