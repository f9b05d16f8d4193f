"""What a line of a program says: the variable that it assigns, the module that it calls, a call that it hands on."""

import ast
import linecache
from functools import cache
from typing import Any, NamedTuple

# Names that say nothing of what they hold: the line that calls says more.
PLAIN = {"x", "y", "z", "h", "out", "output", "outputs", "result", "res", "ret", "tmp", "_"}
PLAIN_MODULES = {"apply", "call", "fn", "forward", "fun", "func", "function", "layer", "model", "module", "outputs"}

Position = tuple[int, int]  # line and column, of bytes in UTF-8


class _File(NamedTuple):
    """Statements that hold no others: (start, end, assigned variable); calls by their start, outermost first; scopes.

    ``scopes``: (start, end, parameters) of functions.
    """

    statements: tuple[tuple[Position, Position, str], ...]
    calls: dict[Position, tuple[ast.Call, ...]]
    scopes: tuple[tuple[Position, Position, frozenset[str]], ...]


def assigned_variable(file: str, line: int, column: int) -> str:
    """Return the first variable that the statement at a place assigns; empty where it assigns none."""
    here = [x for x in _parse(file).statements if x[0] <= (line, column) < x[1]]
    return max(here)[2] if here else ""


def module_called(file: str, line: int, column: int, code: str, by_self: bool) -> str:
    """Return the name of the module that a call at a place is of: ``self.up(x)``, ``Dense(8, name="up")(x)``.

    ``code``: the function that runs then; one of that very name is a method, or a function. ``by_self``: of those that
    ``self`` holds alone, or that are made there.
    """
    every = _parse(file).calls.get((line, column), ())
    if not every:
        return ""
    inner, name = every[-1], _name(every[-1].func)
    if len(every) > 1 and every[-2].func is inner:  # made and called
        given = next((k.value for k in inner.keywords if k.arg == "name"), None)
        said = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""
        name = said or (name if name[:1].isupper() else "")
    elif name == code or (by_self and _root(inner.func) != "self"):
        return ""
    name = name.strip("_")
    return "" if name in PLAIN_MODULES or len(name) == 1 or not name.isidentifier() else name


def _root(node: object) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def hands_on(file: str, line: int, column: int) -> bool:
    """Whether a place calls a function that its own was handed, with all that it was given: ``return fn(*args)``."""
    if assigned_variable(file, line, column) not in {"", *PLAIN}:
        return False
    found = _parse(file)
    handed = {n for start, end, names in found.scopes if start <= (line, column) < end for n in names}
    return any(
        isinstance(call.func, ast.Name)
        and call.func.id in handed
        and any(isinstance(x, ast.Starred) for x in call.args)
        for call in found.calls.get((line, column), ())
    )


@cache
def _parse(file: str) -> _File:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))  # which holds the cells of notebooks, too
    except (SyntaxError, ValueError):
        return _File((), {}, ())
    statements, scopes = [], []
    calls: dict[Position, tuple[ast.Call, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            statements.append((*_span(node), _name(targets[0])))
        elif isinstance(node, ast.Call):
            start = _span(node)[0]
            calls[start] = (*calls.get(start, ()), node)
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            a = node.args
            scopes.append((*_span(node), frozenset(x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs))))
    return _File(tuple(statements), calls, tuple(scopes))


def _span(node: Any) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _name(target: object) -> str:
    if isinstance(target, ast.Tuple | ast.List):
        return next((n for t in target.elts if (n := _name(t)) and n not in PLAIN), "")
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript):
        key = target.slice
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else _name(target.value)
    return target.id if isinstance(target, ast.Name) else ""
