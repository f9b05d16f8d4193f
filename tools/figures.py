"""The shape of the package in figures: ``python -m tools.figures``.

Rooms and what lies at the root, pairs of rooms and of folders that import each other's modules, imports that climb, the
longest module, functions of many parameters, parameters of type Any, lines kept from the formatter, function names that
are one bare participle, and public names that several modules define.
"""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "precaudit"
MANY = 6  # parameters
IRREGULAR = {
    "begun", "broken", "built", "done", "drawn", "fed", "found", "given", "gone", "held", "kept", "known", "laid",
    "left", "lost", "made", "meant", "put", "read", "said", "seen", "sent", "set", "shown", "split", "taken", "told",
    "written",
}  # fmt: skip
REGULAR = re.compile(r"[a-z]{3,}ed")
NOUNS = {"speed", "need", "seed", "feed"}


def trees() -> Iterator[tuple[str, ast.Module, str]]:
    """Yield every module's path below the package, its syntax tree and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(text), text


def folder(name: str) -> str:
    """Return a module's folder, or itself where it lies at the root."""
    return name.rpartition("/")[0] or name.removesuffix(".py")


def room(name: str) -> str:
    """Return a module's room, or itself where it lies at the root."""
    return name.partition("/")[0].removesuffix(".py")


def modules_of(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of the package that one imports, as paths."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("precaudit"):
            below = (node.module or "").split(".")[1:]
            for name in ("/".join([*below, alias.name]) for alias in node.names):
                each = (f"{name}.py", f"{name}/__init__.py", f"{'/'.join(below)}.py", f"{'/'.join(below)}/__init__.py")
                found |= {x for x in each if x in known} and {next(x for x in each if x in known)}
    return found


def is_participle(name: str) -> bool:
    """Whether a function's name is one bare participle."""
    word = name.lstrip("_")
    return word in IRREGULAR or (REGULAR.fullmatch(word) is not None and word not in NOUNS)


def parameters(f: ast.FunctionDef) -> list[ast.arg]:
    """Return a function's parameters but self and cls."""
    every = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
    return [a for a in every if a.arg not in ("self", "cls")]


def share(some: int, every: int) -> str:
    """Return how many of how many, and per cent."""
    return f"{some} of {every} ({100 * some / every:.1f} %)"


def figures() -> dict[str, str]:
    """Return every figure by what it counts."""
    every = list(trees())
    known = {name for name, _, _ in every}
    arrows = [(n, m) for n, tree, _ in every for m in modules_of(tree, known)]
    pairs, rooms_pairs = ({(f(n), f(m)) for n, m in arrows if f(n) != f(m)} for f in (folder, room))
    functions = [f for _, tree, _ in every for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    given = [a for f in functions for a in parameters(f)]
    bare = [f.name for f in functions if is_participle(f.name)]
    public: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree, _ in every:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                public[node.name].add(name)
    several = [name for name, where in public.items() if len(where) > 1]
    lengths = {name: len(text.splitlines()) for name, _, text in every}
    many = sum(len(parameters(f)) > MANY for f in functions)
    loose = sum(a.annotation is not None and ast.unparse(a.annotation) == "Any" for a in given)
    longest = max(lengths, key=lambda name: lengths[name])
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    return {
        "rooms": str(len(rooms)),
        "modules at the root": str(sum("/" not in name for name in known)),
        "pairs of rooms and root modules": str(len(rooms_pairs)),
        "pairs of folders within them": str(len(pairs)),
        "lines": f"{sum(lengths.values()):,} in {len(known)} modules",
        "longest module": f"{lengths[longest]} ({longest})",
        f"functions of more than {MANY} parameters": str(many),
        "parameters of type Any": str(loose),
        "lines kept from the formatter": str(sum(text.count("# fmt: skip") for _, _, text in every)),
        "functions named by a bare participle": share(len(bare), len(functions)),
        "public names in several modules": share(len(several), len(public)),
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for what, figure in figures().items():
        print(f"{what:40} {figure}")
