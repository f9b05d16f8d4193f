"""``FILE.py:NAME`` and ``module:NAME``: a Program that the user names. Naming it is what lets its code run."""

import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from precaudit.caching import cache_folder
from precaudit.errors import UserError, nearest
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.schema.program_names import program_names, require_name
from precaudit.schema.toml import read_toml
from precaudit.writing import write_whole

OWN = Path(__file__).parents[2]  # our code, wherever a clone lies
KERNELS = re.compile(r"precaudit\.kernels(?=\.|$)")  # where commands of earlier versions name the kernels that ship
REFERENCE = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def is_reference(text: str) -> bool:
    """Whether a subject is named as a program is, and is no file."""
    return REFERENCE.fullmatch(text) is not None and not Path(text).exists()


def load_program(reference: str) -> Program:
    """Import what a reference names and return its Program; raises UserError with the user's line where it fails."""
    found = _import(reference, "program", lambda x: isinstance(x, Program))
    if not isinstance(found, Program):
        raise UserError(f"{reference} is no precaudit.Program but {type(found).__name__}{_how_to_name(reference)}")
    return found


def _how_to_name(reference: str) -> str:
    """Return which programs the file has; else how one is written."""
    where, _, name = reference.rpartition(":")
    if known := program_names(Path(where)):
        return f"; in that file are: {', '.join(f'{where}:{n}' for n in known)}"
    return f"; write one: program = precaudit.Program(call={name}, params=..., cases={{...}})"


def rename_points(program: Program, path: Path) -> Program:
    """Return a program with points under the names that a TOML file gives (``q = "query_proj"``); raises UserError."""
    return program.altered(points={**(program.points or {}), **read_toml(path)})


def load_function(reference: str) -> Callable[..., Any]:
    """Import what a reference names and return that function; raises UserError as ``load_program``."""
    found = _import(reference, "function", callable)
    if not callable(found):
        raise UserError(f"{reference} is no function but {type(found).__name__}")
    return cast("Callable[..., Any]", found)


def load_attribute(reference: str) -> Any:
    """Import what a reference names; raises UserError as ``load_program``."""
    return _import(reference, "value", lambda x: not callable(x))


def has(reference: str) -> bool:
    """Whether a module or file that can be imported holds what a reference names."""
    try:
        load_attribute(reference)
    except UserError:
        return False
    return True


def _import(reference: str, what: str, fits: Callable[[Any], bool]) -> Any:
    match = REFERENCE.fullmatch(reference)
    if match is None:
        if what == "program":
            require_name(reference)
        raise UserError(f"{reference!r} names no {what}: give FILE.py:NAME or module:NAME")
    where, name = KERNELS.sub("precaudit.checks.kernels", match["where"]), match["name"]
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where} cannot be imported: {type(error).__name__}: {error}{raising_line(error)}") from None
    try:
        found = getattr(module, name)
    except AttributeError:
        names = [n for n, v in vars(module).items() if fits(v)]
        held = "Program" if what == "program" else what
        none = f"{where} has no {name!r}" + (nearest(name, names) if names else f": it holds no {held}")
        raise UserError(none) from None
    except Exception as error:  # of a module's own __getattr__
        said = f"{type(error).__name__}: {error}{raising_line(error)}"
        raise UserError(f"{where} does not give {name!r}: {said}") from None
    return found


def _file(path: Path) -> Any:
    """Import a file as a module of its own, its folder first on the path as when it is run.

    Afterwards it is the last: what we import later is no file beside it, and functions of it still find its neighbours.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    full = path.resolve()
    folder = str(full.parent)
    name = f"precaudit_program_{full.stem}"  # a file may be called as a library is
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        if folder in sys.path:  # the file may have changed the path itself
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def named_of(opened: Opened, program: str | None) -> str:
    """Return the name of a run's program; its code runs where the user named it, here or when it was traced.

    Raises UserError where the run names none, or one that this user did not trace as it stands.
    """
    if program is not None:
        return program
    named = opened.record.program
    if not named and (command := opened.record.watched) is not None:
        raise UserError(
            f"{opened.folder} holds calls of a command: precaudit compare {opened.folder} --rerun runs it again "
            f"({shlex.join(command.words)})"
        )
    if not named:
        raise UserError(f"{opened.folder} does not say which program it is of; give it with --program FILE.py:NAME")
    if not is_trusted(named):
        raise UserError(
            f"{opened.folder} is of {named}, which was not traced here as it stands: to run its code, name it with "
            f"--program {named}"
        )
    return named


def program_of(opened: Opened, program: Program | str | None) -> Program:
    """Return a run's program, as it is given or by its name; raises UserError as ``named_of`` and ``load_program``."""
    return program if isinstance(program, Program) else load_program(named_of(opened, program))


def raising_line(error: Exception) -> str:
    """Return the line of the user's that raised, where there is one."""
    before = error.__cause__  # where JAX tells of the line that it had traced
    at = [
        *traceback.extract_tb(None if before is None else before.__traceback__),
        *traceback.extract_tb(error.__traceback__),
    ]
    machinery = ("importlib", "/jax/_src/")
    theirs = (
        f for f in reversed(at) if OWN not in Path(f.filename).parents and not any(x in f.filename for x in machinery)
    )
    last = next(theirs, None)
    return "" if last is None else f" ({last.filename}:{last.lineno})"


def source_of(reference: str) -> Path | None:
    """Return the file a reference names; None for a module."""
    where = reference.rpartition(":")[0]
    return Path(where).resolve() if where.endswith(".py") else None


def trust(reference: str) -> None:
    """Note that the user named this program, so that its own runs may be compared without naming it again.

    Where the disk takes no note that is said, and the runs need the name.
    """
    path = _note(reference)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, reference + "\n")
    except OSError as error:
        warnings.warn(f"{path}: {error.strerror}: name the program again with --program {reference}", stacklevel=2)


def is_trusted(reference: str) -> bool:
    """Whether this user traced this very source before: a run of someone else's names code and runs none."""
    path = _note(reference)
    return path is not None and path.is_file()


def _note(reference: str) -> Path | None:
    """Return where it is noted that a program was named, by its source's bytes; None where they cannot be read."""
    source = source_of(reference)
    if source is None:
        spec = importlib.util.find_spec(reference.rpartition(":")[0].partition(".")[0])
        source = Path(spec.origin) if spec is not None and spec.origin else None
    try:
        data = source.read_bytes() if source is not None else None
    except OSError:
        return None
    if data is None:
        return None
    digest = hashlib.sha256(os.fsencode(str(source)) + b"\0" + reference.rpartition(":")[2].encode() + b"\0" + data)
    return cache_folder("programs") / digest.hexdigest()[:32]
