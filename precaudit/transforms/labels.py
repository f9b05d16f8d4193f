"""What a user would call a value of a program: the variable that the line which made it assigns."""

import ast
import linecache
import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from precaudit.transforms.jax_versions import frames

# Frames of libraries that build programs; models that live in packages are their authors' code and count.
LIBRARIES = re.compile(
    r"[/\\](jax|jaxlib|flax|equinox|einops|jaxtyping|optax|haiku|numpy|ml_dtypes)[/\\]|<frozen|<string>"
)
TRACED_BY = re.compile(r"[/\\]precaudit[/\\](transforms|programs)[/\\]")  # what calls the program: no frame of it
STANDARD = Path(ast.__file__).parent  # functools, contextlib
# Names that say nothing of what they hold: the line that calls says more.
PLAIN = {"x", "y", "z", "h", "out", "output", "outputs", "result", "res", "ret", "tmp", "_"}


class Label(NamedTuple):
    """A value's name, the innermost line of the user's code that made it (``file.py:12``), and all frames it was in."""

    name: str
    source: str
    stack: tuple[tuple[str, int, int], ...] = ()


@cache
def label(stack: tuple[tuple[str, int, int, str], ...]) -> Label:
    """Return the label of a value from the frames (file, line, column, function) it was made in, innermost first.

    The name is the first variable the innermost statement assigns that is not one of PLAIN, else that of the statement
    around, and so on out; where none is assigned, the innermost function's.
    """
    stack = tuple(takewhile(lambda f: not TRACED_BY.search(f[0]), stack))
    own = tuple(f for f in stack if not LIBRARIES.search(f[0]) and Path(f[0]).parent != STANDARD)
    if not own:
        return Label("value", "")
    source = f"{Path(own[0][0]).name}:{own[0][1]}"
    places = tuple(f[:3] for f in own)
    plain = ""
    for file, line, column, function in own:
        name = "" if function == "<lambda>" else assigned(file, line, column)  # that holds the function, no value of it
        if name and name not in PLAIN:
            return Label(name, source, places)
        plain = plain or name
    functions = (f[3].rpartition(".")[2] for f in own if f[3] != "<lambda>")
    return Label(plain or next(functions, "value"), source, places)


def of_equation(equation: Any) -> Label:
    """Return the label of what an equation makes."""
    return label(frames(equation))


def assigned(file: str, line: int, column: int) -> str:
    """Return the first variable that the statement at a place assigns; empty where it assigns none."""
    here = [x for x in _statements(file) if x[0] <= (line, column) < x[1]]
    return max(here)[2] if here else ""


@cache
def _statements(file: str) -> tuple[tuple[tuple[int, int], tuple[int, int], str], ...]:
    """Return (start, end, assigned variable) of the statements of a file that hold no others."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))  # which holds the cells of notebooks, too
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            found.append(((node.lineno, node.col_offset), end, _name(targets[0])))
    return tuple(found)


def _name(target: Any) -> str:
    if isinstance(target, ast.Tuple | ast.List):
        return next((n for t in target.elts if (n := _name(t)) and n not in PLAIN), "")
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript):
        key = target.slice
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else _name(target.value)
    return target.id if isinstance(target, ast.Name) else ""
