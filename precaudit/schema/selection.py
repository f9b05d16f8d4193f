"""What the user wants to see: layers, points, phases, positions, prompts."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from precaudit.errors import UserError, nearest
from precaudit.schema.graphs.decoder import DEFAULT_POINTS, LOGITS, POINTS, support
from precaudit.schema.point_names import point_hint

Texts = str | int | Sequence[str] | Sequence[int]  # a filter: as on the command line, a number, or a list
PHASES = ("prefill", "decode", "rescore")


class FilterTexts(TypedDict, total=False):
    """Filters as the functions of the package take them by keyword; None: all."""

    layers: Texts | None
    points: Texts | None
    phases: Texts | None
    positions: Texts | None
    prompt: Texts | None


def filter_text(name: str, given: object) -> str | None:
    """Return a filter as it is written on the command line; raises UserError for what is none."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if isinstance(given, Iterable):
        return ",".join(map(str, given))
    raise UserError(f"{name}={given!r} is no text such as '0,15:18', number or list of them")


@dataclass(frozen=True)
class Filters:
    """Filters of a run as they are written after ``--layers``, ``--points`` and so on; None: all."""

    layers: str | None = None
    points: str | None = None
    phases: str | None = None
    prompt: str | None = None
    positions: str | None = None

    @classmethod
    def of(cls, verb: str, given: Mapping[str, object]) -> "Filters":
        """Return the filters that a function was given by keyword; raises UserError for a keyword that is none."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UserError(f"precaudit.{verb} takes no {name!r}{nearest(name, known)}")
        return cls(**{name: filter_text(name, x) for name, x in given.items()})

    @property
    def options(self) -> list[str]:
        """They as words of a command line."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [word for name, text in given if text is not None for word in (f"--{name}", text)]

    @property
    def text(self) -> str:
        """They as one writes them."""
        return shlex.join(self.options)


@dataclass(frozen=True)
class Selection:
    """Filters of a run or a look at one; None means all. ``unnamed``: points that only the word ``all`` asks for."""

    layers: str | None = None
    points: tuple[str, ...] = DEFAULT_POINTS
    every_logit: bool = False
    phases: tuple[str, ...] = PHASES
    positions: str | None = None
    prompts: tuple[str, ...] | None = None
    unnamed: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        layers: str | None = None,
        points: str | None = None,
        phases: str | None = None,
        positions: str | None = None,
        prompts: str | None = None,
    ) -> "Selection":
        """Build a selection from command-line texts; raises UserError naming the unknown word."""
        chosen, every = parse_points(points) if points is not None else (DEFAULT_POINTS, False)
        if positions is not None:
            parse_positions(positions, 1)
        named = _words(points) or ()
        unnamed = tuple(p for p in chosen if p not in named) if "all" in named else ()
        return cls(layers, chosen, every, parse_phases(phases), positions, _words(prompts), unnamed)

    @property
    def support(self) -> tuple[str, ...]:
        """The points recorded only because a local error needs them."""
        return support(self.points, self.phases)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(w.strip() for w in text.split(",") if w.strip())


def names_in(text: str, what: str) -> tuple[str, ...]:
    """Return the names in ``"a,b"``; raises UserError where there is none."""
    if not (names := _words(text) or ()):
        raise UserError(f"no {what} is named")
    return names


def parse_phases(text: str | None) -> tuple[str, ...]:
    """Return the phases named in ``"prefill,decode"``, in order; all of them for None."""
    words = _words(text)
    if words is None:
        return PHASES
    for word in words:
        if word not in PHASES:
            raise UserError(f"unknown phase {word!r}{nearest(word, PHASES)}")
    if not words:
        raise UserError("no phase is named; for example --phases prefill,decode")
    return tuple(p for p in PHASES if p in words)


def _slice(text: str, n: int, what: str) -> list[int]:
    """Return the indices one item of a slice list names among ``n``; raises UserError when out of range."""
    try:
        parts = [int(p) if p else None for p in text.split(":")]
    except ValueError:
        raise UserError(f"{what} {text!r} is not a number or a slice such as 0,15:18,-1") from None
    if len(parts) == 1:
        index = parts[0]
        if index is None or not -n <= index < n:
            raise UserError(f"{what} {text} is out of range: there are {n} ({what}s 0 to {n - 1})")
        return [index % n]
    if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
        raise UserError(f"{what} {text!r} is not a slice such as 15:18 or ::2")
    found = list(range(n))[slice(*parts)]
    if not found:
        raise UserError(f"{what}s {text} name none of the {n} (0 to {n - 1})")
    return found


def parse_layers(text: str | None, n: int) -> tuple[int, ...]:
    """Return the sorted layers that ``"0,15:18,-1"`` names among ``n`` (Python slices); raises UserError."""
    if text is None:
        return tuple(range(n))
    items = _words(text)
    if not items:
        raise UserError("no layer is named; for example --layers 0,15:18,-1")
    if n == 0:
        raise UserError(f"--layers {text}: the program scans over none, its layers are written out; choose by --points")
    return tuple(sorted({i for item in items for i in _slice(item, n, "layer")}))


def parse_positions(text: str | None, n: int) -> tuple[int, ...]:
    """Return the sorted positions that ``"last:16,::64"`` names among ``n``.

    Positions past the end of a short prompt are left out: one filter serves prompts of all lengths.
    """
    if text is None:
        return tuple(range(n))
    items = _words(text)
    if not items:
        raise UserError("no position is named; for example --positions last:16,::64")
    found: set[int] = set()
    for item in items:
        if item.startswith("last:"):
            count = item.removeprefix("last:")
            if not count.isdigit() or int(count) == 0:
                raise UserError(f"positions {item!r}: after 'last:' comes how many, for example last:16")
            found.update(range(max(0, n - int(count)), n))
            continue
        try:
            found.update(_slice(item, n, "position"))
        except UserError as error:
            if "out of range" not in str(error) and "name none" not in str(error):
                raise
    return tuple(sorted(found))


def choose_prompts(wanted: tuple[str, ...] | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the prompt ids to use, in file order; raises UserError for one that is not there, and where none is."""
    if not known:
        raise UserError("there is no prompt; give at least one")
    if wanted is None:
        return tuple(known)
    if not wanted:
        raise UserError("no prompt is named; for example --prompt p5_ba")
    for name in wanted:
        if name not in known:
            raise UserError(f"unknown prompt {name!r}{prompt_hint(name, known)}")
    return tuple(k for k in known if k in wanted)


def prompt_hint(name: str, known: Sequence[str]) -> str:
    """Return what a word after --prompt may stand for: the nearest id; a text belongs to another option."""
    is_text = len(name.split()) > 1 or "\n" in name
    return "; a text of your own goes to trace --text" if is_text else nearest(name, known)


def check_names(given: str, what: str, known: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names in ``"a,b"``; raises UserError for one that is not known. Of points ``all`` is.

    ``where``: what lacks it, such as "the run holds".
    """
    names = names_in(given, what)
    for name in names:
        if name not in known and (what, name) != ("point", "all"):
            hint = point_hint if what == "point" else prompt_hint if what in ("prompt", "case") else nearest
            raise UserError(f"{where} no {what} {name!r}{hint(name, known)}")
    return names


def parse_points(text: str) -> tuple[tuple[str, ...], bool]:
    """Return the points named in ``"q,k,logits:all"`` in table order, and whether logits are wanted everywhere.

    ``all`` names every point. Raises UserError for an unknown one.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UserError("no point is named; for example --points q,k,v,attn_out,logits")
    everywhere = f"{LOGITS}:all"
    every_logit = everywhere in names
    chosen = {LOGITS if n == everywhere else n for n in names}
    if "all" in chosen:
        chosen = (chosen - {"all"}) | set(POINTS)
    for name in chosen:
        if name not in POINTS:
            raise UserError(f"unknown point {name!r}{point_hint(name, [*POINTS, 'all', everywhere])}")
    return tuple(n for n in POINTS if n in chosen), every_logit
