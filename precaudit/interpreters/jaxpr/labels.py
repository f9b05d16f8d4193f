"""What a user would call a value of a program: the variable that the line which made it assigns, or a module's name."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import frames
from precaudit.interpreters.jaxpr.statements import PLAIN, assigned_variable, hands_on, module_called

# Frames of libraries that build programs; models that live in packages are their authors' code and count.
LIBRARIES = re.compile(
    r"[/\\](jax|jaxlib|flax|equinox|einops|jaxtyping|optax|haiku|numpy|ml_dtypes)[/\\]|<frozen|<string>"
    r"|[/\\]keras[/\\](?!src[/\\]applications)|[/\\]penzai[/\\](?!models)"
)
JAX = re.compile(r"[/\\](jax|jaxlib)[/\\]")
TRACED_BY = re.compile(
    r"[/\\]precaudit[/\\](interpreters[/\\]jaxpr|recording[/\\]programs)[/\\]"
)  # what calls the program: no frame of it
STANDARD = Path(ast.__file__).parent  # functools, contextlib
CALLED = {"__call__", "call"}  # a module's own code

Frame = tuple[str, int, int, str]  # file, line, column, function


class Label(NamedTuple):
    """A value's name, the innermost line of the user's code that made it (``file.py:12``), and all frames it was in.

    ``named``: whether anything there gives it its name.
    """

    name: str
    source: str
    stack: tuple[tuple[str, int, int], ...] = ()
    named: bool = True


@cache
def label(stack: tuple[Frame, ...], scope: str = "") -> Label:
    """Return the label of a value from the frames it was made in, innermost first, and the scope's name.

    Frames of libraries, and those that hand a call on, are left out. The name is the first variable the innermost
    statement assigns that is not one of PLAIN, else the module that it calls, else what the statement around it says,
    and so on out; modules that libraries call below it come after that, ``attended.query``. Where nothing is said, it
    is the scope's, or the innermost function's.
    """
    stack = tuple(takewhile(lambda f: not TRACED_BY.search(f[0]), stack))
    every = [i for i, f in enumerate(stack) if not LIBRARIES.search(f[0]) and Path(f[0]).parent != STANDARD]
    own = [i for i in every if not hands_on(*stack[i][:3])] or every
    if not own:
        return Label(scope or "value", "", named=bool(scope))
    first = stack[own[0]]
    source = f"{Path(first[0]).name}:{first[1]}"
    places = tuple(stack[i][:3] for i in own)
    plain, begin = "", 0
    for i in own:
        file, line, column, function = stack[i]
        name = (
            "" if function == "<lambda>" else assigned_variable(file, line, column)
        )  # that holds the function, no value of it
        below = _modules(stack, [j for j in range(begin, i) if stack[j][3] in CALLED])
        if not name or name in PLAIN:
            below = [*_modules(stack, [i]), *below]
            plain, name = plain or name, ""
        if said := ".".join((*filter(None, [name]), *below)):
            return Label(said, source, places)
        begin = i + 1
    named = (stack[i][3].rpartition(".")[2] for i in own)  # no <lambda>, and no <dictcomp>, which newer Pythons lack
    functions = (name for name in named if not name.startswith("<"))
    said = scope or plain or next(functions, "")
    return Label(said or "value", source, places, bool(said))


def of_equation(equation: jex.JaxprEqn) -> Label:
    """Return the label of what an equation makes."""
    scopes = [x for x in str(equation.source_info.name_stack).split("/") if x.isidentifier() and len(x) > 1]
    return label(frames(equation), scopes[-1] if scopes else "")


def _modules(stack: Sequence[Frame], within: Sequence[int]) -> list[str]:
    """Return the names of the modules that some frames call, outermost first."""
    return [name for i in reversed(within) if (name := _module(stack, i))]


def _module(stack: Sequence[Frame], i: int) -> str:
    """Return the name of the module that a frame calls; empty unless a module's own code is what runs next.

    Between the two there may be dispatch, by libraries or by what hands a call on.
    """
    file, line, column, _ = stack[i]
    inside = stack[:i][::-1]
    for each in (f for f in inside if not JAX.search(f[0])):  # JAX's own files are long, and nothing is asked of them
        if hands_on(*each[:3]):
            continue
        if each[3] in CALLED:
            runs = next(f for f in inside if not hands_on(*f[:3]))
            return module_called(file, line, column, runs[3], LIBRARIES.search(file) is not None)
        if not LIBRARIES.search(each[0]):
            return ""
    return ""
