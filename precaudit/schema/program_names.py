"""The names of a file that may be programs, read without running it."""

import ast
from pathlib import Path

from precaudit.errors import UserError

CALLED = ("Program", "altered", "replace", "announcing")  # what returns a program


def require_name(text: str) -> None:
    """Raise UserError for a file of Python without ``:NAME``, saying which programs it holds."""
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        return
    if names := program_names(path):
        each = " or ".join(f"{text}:{name}" for name in names)
        raise UserError(f"{text} is a file of Python: name the program in it, {each}")
    raise UserError(f"{text} is a file of Python: give {text}:NAME, a precaudit.Program in it; none is seen there")


def program_names(path: Path) -> list[str]:
    """Return the names at a file's top that it assigns a Program to; none where it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [t.id for t in targets if isinstance(t, ast.Name)]
            found += named if _last_name(node.value.func) in CALLED else []
    return found


def _last_name(function: ast.expr) -> str:
    """Return ``Program`` for ``precaudit.Program``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
