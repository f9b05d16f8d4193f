"""The script of ``precaudit watch``, run in a process of its own with jitted functions counted.

``python -m precaudit.workflows.watched ORDER SCRIPT.py ARGUMENTS``, or ``ORDER -m MODULE ARGUMENTS``. Calls that were
picked are recorded when the last of a group has ended, before the script goes on; they are compared, and what was seen
goes to the file that ORDER names, after the script's last line.
"""

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from precaudit.recording.watching.calls import Function, Picked, Watch, shapes_text
from precaudit.recording.watching.records import SeenFunction, SeenScript, WatchOrder
from precaudit.workflows.recorder import Recorder


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has JAX watched when the script imports it, and not before: what it sets first, XLA_FLAGS, still holds."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.inner: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Find jax as everybody does, to be loaded by this."""
        if name != "jax" or self.inner is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        self.inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        """Make the module as its own loader does."""
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load it, and wrap what it jits with."""
        self.inner.exec_module(module)
        self.watch.put_into(module)


def run_script(arguments: Sequence[str]) -> int:
    """Run a script or ``-m`` module as Python does and return its exit code; its traceback begins in it."""
    module = arguments[0] == "-m"
    target, rest = (arguments[1], arguments[2:]) if module else (arguments[0], arguments[1:])
    sys.argv = [target, *rest]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc(limit=-1)
        return 130
    except BaseException as error:
        tb = error.__traceback__
        while tb is not None and tb.tb_next is not None and _is_before_script(tb.tb_frame.f_code.co_filename):
            tb = tb.tb_next
        sys.excepthook(type(error), error.with_traceback(tb), tb)
        return 1
    return 0


def _is_before_script(file: str) -> bool:
    return file == __file__ or "runpy" in os.path.basename(file)


def main(arguments: Sequence[str]) -> int:
    """Run the script, write what was seen of it, and return its exit code."""
    order = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=WatchOrder)
    recorder, process = Recorder(order), os.getpid()
    if order.again is not None and recorder.notes:  # another environment
        return _tell(order, SeenScript(code=0, functions=(), notes=tuple(recorder.notes)))
    picked = order.picked
    watch = Watch(Picked(picked.name, picked.file, picked.calls), recorder.take)
    before = sys.modules.get("jax")
    if before is not None:
        watch.put_into(before)
    else:
        sys.meta_path.insert(0, AfterImport(watch))
    code = run_script(arguments[1:])
    if os.getpid() != process:  # what the script forked ends here, too
        return code
    notes = ["JAX was imported before the script: functions jitted before it are not watched"] if before else []
    if "jax" in sys.modules:
        notes += _end(watch, recorder, code)
    else:
        notes.append("the script did not import JAX")
    functions = tuple(map(_seen, watch.functions))
    return _tell(order, SeenScript(code=code, functions=functions, runs=recorder.runs, notes=tuple(notes)))


def _end(watch: Watch, recorder: Recorder, code: int) -> list[str]:
    """Record what waits, compare what was recorded, and return what could not be."""
    waiting = []
    for f in watch.functions:
        if code == 0:
            watch.hand_over(f, ended=True)
        elif f.kept:
            numbers = ", ".join(str(k.number) for k in f.kept)
            waiting.append(f"{f.name}: call{'' if len(f.kept) == 1 else 's'} {numbers}")
    watch.take_out()
    recorder.compare()
    lost = [f"the script ended with exit code {code}: not recorded was {x}" for x in waiting]
    return [*recorder.notes, *lost]


def _tell(order: WatchOrder, seen: SeenScript) -> int:
    Path(order.result).write_bytes(msgspec.json.encode(seen))
    return seen.code


def _seen(f: Function) -> SeenFunction:
    return SeenFunction(
        name=f.name,
        place=f.place,
        calls=f.calls,
        within=f.within,
        compiled=f.compiled,
        seconds=f.seconds,
        equations=f.equations,
        formats=f.formats,
        shapes=tuple(tuple(shapes_text(s)) for s in f.shapes),
        kept=tuple(f.numbers),
        unseen=tuple(f.unseen),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
