"""``jax.jit`` as a watched script has it: every jitted function counted by name and line, some calls kept whole.

Loaded before the script runs; JAX is not imported before the script imports it.
"""

import functools
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from precaudit.recording.watching.functions import (
    called_place,
    count_equations,
    dynamic_arguments,
    host_copy,
    is_renamed,
    name_and_place,
)

Shapes = tuple[tuple[Any, tuple[int, ...]], ...]  # the format and shape of every array
LOWERED = "lowered: calls of what it compiled are not watched"
LAST = -1  # of calls that are picked: the last that a function has


@dataclass
class Kept:
    """A call that is kept: its number, what JAX traced of it, its dynamic input leaves and its outputs' on the host.

    ``linked``: {input leaf: output leaf} of the call before that are one object.
    """

    number: int
    traced: Any
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    linked: dict[int, int] = field(default_factory=dict)


@dataclass
class Function:
    """A jitted function of the script: its name, where it is defined, and what was called of it.

    ``within``: calls inside what JAX traces, whose calls these are; ``compiled``: for how many shapes, formats and
    placements of arguments; ``shapes``: of its array arguments; ``unseen``: what was not watched, and why;
    ``numbers``: of the calls that were kept; ``kept``: those of them that wait for the last of their group, and
    ``latest`` for what may be the last of all. ``renamed``: its place is a library's wrapper's until it is traced.
    """

    name: str
    place: str
    renamed: bool = False
    calls: int = 0
    within: int = 0
    seconds: float = 0.0
    compiled: int = 0
    shapes: dict[Shapes, None] = field(default_factory=dict)
    equations: int = 0
    formats: tuple[str, ...] = ()
    unseen: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    latest: Kept | None = None

    def note(self, why: str) -> None:
        """Say once what is not seen of it."""
        if why not in self.unseen:
            self.unseen.append(why)

    def place_by(self, traced: Any) -> None:
        """Learn from a trace where the function is defined that a library's wrapper has the name of."""
        if self.renamed:
            self.place, self.renamed = called_place(self.name, traced.jaxpr.jaxpr) or self.place, False


@dataclass(frozen=True)
class Picked:
    """Which calls are kept: of functions of this name, in files that end so; these, or the first of each shape.

    ``calls``: their numbers; LAST is the last that the script makes. ``every``: of whatever function is called.
    """

    name: str = ""
    file: str = ""
    calls: Sequence[int] = ()
    every: bool = False

    def takes(self, of: Function) -> bool:
        """Whether calls of a function are kept."""
        here = of.renamed or of.place.rpartition(":")[0].endswith(self.file)
        return self.every or (bool(self.name) and of.name == self.name and here)

    def keeps(self, of: Function, number: int, shapes: Callable[[], Shapes]) -> bool:
        """Whether a call is kept, by its number among the function's or by its shapes."""
        return number in self.calls or LAST in self.calls if self.calls else shapes() not in of.shapes

    def may_keep_after(self, number: int) -> bool:
        """Whether a call after this one may be kept."""
        return not self.calls or LAST in self.calls or number < max(self.calls)


Ready = Callable[[Function, list[Kept]], None]  # is told of calls, one after another, when the last of them has ended


class Watch:
    """Every jitted function that a script calls while this is ``on``; ``ready`` takes the calls that are kept."""

    def __init__(self, picked: Picked, ready: Ready | None = None) -> None:
        self.picked, self.ready = picked, ready
        self.functions: list[Function] = []
        self.lock = threading.RLock()
        self.on = True
        self.busy = threading.local()
        self.original: dict[tuple[Any, str], Any] = {}  # by module and name
        self.jax: Any = None
        self.is_clean: Callable[[], bool] = lambda: True

    def use(self) -> None:
        """Know JAX, and wrap nothing of it."""
        import jax
        from jax._src import core

        self.jax, self.is_clean = jax, getattr(core, "trace_state_clean", self.is_clean)  # no public way to ask

    def put_into(self, jax: Any) -> None:
        """Wrap what JAX jits with."""
        self.use()
        self.original = {(jax, "jit"): jax.jit, (jax, "pmap"): jax.pmap}
        with warnings.catch_warnings(action="ignore"), suppress(ImportError):  # deprecated, and in use
            from jax.experimental import pjit

            self.original[pjit, "pjit"] = pjit.pjit
        for (module, name), f in self.original.items():
            setattr(module, name, (self._named_only if name == "pmap" else self._jit)(f))

    def take_out(self) -> None:
        """Leave JAX as it was; functions jitted before go on, and are no longer counted."""
        self.on = False
        for (module, name), original in self.original.items():
            setattr(module, name, original)

    def is_own(self) -> bool:
        """Whether this thread records calls: what is jitted meanwhile is not the script's."""
        return getattr(self.busy, "recording", False)

    def shapes(self, args: object, kwargs: object) -> Shapes:
        """Return the formats and shapes of a call's arrays; what else has a format is none."""
        import numpy as np

        arrays = (self.jax.Array, np.ndarray, np.generic)
        return tuple((x.dtype, x.shape) for x in self.jax.tree.leaves((args, kwargs)) if isinstance(x, arrays))

    def function_of(self, f: Any) -> Function:
        """Return the record of a function that is jitted here; of one that is jitted again, the one it has."""
        with self.lock:
            named = name_and_place(f)
            same = (x for x in self.functions if (x.name, x.place) == named and x.place)
            if (found := next(same, None)) is None:
                self.functions.append(found := Function(*named, renamed=is_renamed(f)))
            return found

    def hand_over(self, of: Function, ended: bool = False) -> None:
        """Have the calls that wait recorded, with the last where the script has ended; what this jits is not seen."""
        with self.lock:
            group, of.kept = of.kept, []
        if ended and of.latest is not None and of.latest.number not in of.numbers:
            group.append(of.latest)
            of.numbers.append(of.latest.number)
        self.busy.recording = True
        try:
            if self.ready is not None:
                for calls in sequences(group):
                    self.ready(of, calls)
        finally:
            self.busy.recording = False

    def _jit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def jit(fun: Any = None, /, *args: Any, **how: Any) -> Any:
            if fun is None:
                return functools.partial(jit, **how)
            jitted = original(fun, *args, **how)
            return jitted if self.is_own() else Jitted(jitted, fun, how, self)

        return jit

    def _named_only(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(fun: Any, *args: Any, **how: Any) -> Any:
            found = Jitted(original(fun, *args, **how), fun, how, self)
            found._of.note(f"{original.__name__}: counted, not recorded")
            return found

        return wrapped


class Jitted:
    """A jitted function that counts its calls and keeps some; everything else is the jitted function's own."""

    def __init__(self, jitted: Any, fun: Any, how: Mapping[str, Any], watch: Watch) -> None:
        functools.update_wrapper(self, fun, updated=())
        self._jitted, self._fun, self._how, self._watch = jitted, fun, how, watch
        self._of = watch.function_of(fun)
        self._taken = watch.picked.takes(self._of)
        self._size = getattr(jitted, "_cache_size", None)  # how many shapes it was compiled for: no public way to ask
        self._known = 0 if self._size is None else self._size()
        self._last: list[Any] = []  # outputs of the call before, where calls are kept
        self._copies: dict[int, tuple[Any, Any]] = {}  # by identity: an argument of calls that are kept, on the host

    def __getattr__(self, name: str) -> Any:
        return self._lowered if name == "lower" else getattr(self._jitted, name)

    def _lowered(self, *args: Any, **kwargs: Any) -> Any:
        """Lower it, and say what is not seen then."""
        self._of.note(LOWERED)
        return self._jitted.lower(*args, **kwargs)

    def __get__(self, owner: object, kind: Any = None) -> Any:
        """Bind it as a method, which has its attributes."""
        return self if owner is None else types.MethodType(self, owner)

    def __copy__(self) -> "Jitted":
        """Return itself: calls of a copy are calls of the function."""
        return self

    def __deepcopy__(self, memo: object) -> "Jitted":
        """Return itself."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; inside what JAX traces, as a part of that."""
        watch, of = self._watch, self._of
        if not watch.on or watch.is_own():
            return self._jitted(*args, **kwargs)
        if not watch.is_clean() or watch.jax.config.jax_disable_jit:
            of.within += 1
            if watch.jax.config.jax_disable_jit:
                of.note("called under jax.disable_jit, where nothing is jitted")
            return self._jitted(*args, **kwargs)
        with watch.lock:
            number = of.calls
            of.calls += 1
        kept = self._unless_it_fails(self._keep, number, args, kwargs) if self._taken else None
        began = time.perf_counter()
        out = self._jitted(*args, **kwargs)
        of.seconds += time.perf_counter() - began
        if self._size is None or self._size() != self._known or not of.shapes:
            self._unless_it_fails(self._describe, args, kwargs)
        if self._taken:
            self._unless_it_fails(self._ended, number, kept, out)
        return out

    def _unless_it_fails(self, f: Callable[..., Any], *args: Any) -> Any:
        """Return what looking at a call gives; where that breaks, None: the script goes on, and it is said."""
        try:
            return f(*args)
        except Exception as error:
            from precaudit.recording.programs.preparing import error_text

            self._of.note(f"what was to be seen of a call broke off: {error_text(error)}")
            return None

    def _keep(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        """Return a call's arguments where it is picked, copied before it may take their buffers over."""
        of, picked = self._of, self._watch.picked
        if not picked.keeps(of, number, lambda: self._watch.shapes(args, kwargs)):
            return None
        before, self._copies = self._copies, {}
        try:
            traced = self._jitted.trace(*args, **kwargs)
            of.place_by(traced)
            if not picked.takes(of):
                self._taken = False
                return None
            leaves = self._watch.jax.tree.leaves(dynamic_arguments(self._jitted, self._fun, self._how, args, kwargs))
            for x in leaves:  # one copy of what several calls are given
                held, copied = before.get(id(x), (None, None))
                self._copies[id(x)] = (x, copied if held is x else host_copy(x))
        except Exception as error:
            of.note(f"call {number} was not kept: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        outputs = {id(x): i for i, x in enumerate(self._last)}
        linked = {j: outputs[id(x)] for j, x in enumerate(leaves) if id(x) in outputs}
        return Kept(number, traced, [self._copies[id(x)][1] for x in leaves], linked=linked)

    def _ended(self, number: int, kept: Kept | None, out: object) -> None:
        """Note what a call gave, and hand a group that is whole over."""
        of, picked = self._of, self._watch.picked
        leaves, more = self._watch.jax.tree.leaves(out), picked.may_keep_after(number)
        self._last, self._copies = (leaves, self._copies) if more else ([], {})  # copies are of the calls that wait
        if kept is None:
            return
        kept.outputs = [host_copy(x) for x in leaves]
        if LAST in picked.calls:
            of.latest = kept
        if picked.calls and kept.number not in picked.calls:
            return
        with self._watch.lock:
            of.kept.append(kept)
            of.numbers.append(kept.number)
        if kept.number + 1 not in picked.calls:
            self._watch.hand_over(of)

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what it was compiled for: shapes, and of the first how many equations and which formats of floats."""
        of, shapes = self._of, self._watch.shapes(args, kwargs)
        of.compiled += self._size() - self._known if self._size is not None else shapes not in of.shapes
        self._known = 0 if self._size is None else self._size()
        of.shapes[shapes] = None
        if of.equations:
            return
        try:
            traced = self._jitted.trace(*args, **kwargs)
        except Exception:
            return
        of.place_by(traced)
        formats: dict[str, None] = {}
        of.equations = count_equations(traced.jaxpr.jaxpr, formats)
        of.formats = tuple(formats)


def shapes_text(shapes: Shapes) -> list[str]:
    """Return the formats and shapes of arrays as ``float32[2, 3]``."""
    return [f"{dtype}{list(shape)}" for dtype, shape in shapes]


def sequences(kept: Sequence[Kept]) -> list[list[Kept]]:
    """Return kept calls in groups: calls one after another of one trace: the same shapes and static arguments."""
    groups: list[list[Kept]] = []
    for one in sorted(kept, key=lambda k: k.number):
        last = groups[-1][-1] if groups else None
        if last is not None and one.number == last.number + 1 and _is_one_trace(one.traced, last.traced):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _is_one_trace(a: Any, b: Any) -> bool:
    """Whether two traces are of one program: the same equations, and constants that are one object."""
    if a.jaxpr is b.jaxpr:
        return True
    pairs = list(zip(a.jaxpr.consts, b.jaxpr.consts, strict=False))
    same = len(a.jaxpr.consts) == len(b.jaxpr.consts) and all(x is y for x, y in pairs)
    return bool(a.in_avals == b.in_avals and same and str(a.jaxpr) == str(b.jaxpr))
