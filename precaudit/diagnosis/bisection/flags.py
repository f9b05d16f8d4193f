"""Bisection by flags: XLA_FLAGS, LIBTPU_INIT_ARGS and names of jax.config, as a process is started with them (JAX)."""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.processes import Site
from precaudit.errors import UserError

LISTS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that hold several flags
Settings = dict[tuple[str, str], str]  # by variable and flag ("" where it holds one value)


@dataclass(frozen=True)
class FlagSides:
    """What A and B set; ``names``: of every change the variable and the flag."""

    good: Settings
    bad: Settings
    names: Mapping[str, tuple[str, str]]

    @property
    def changes(self) -> Changes:
        """What B sets otherwise, by name."""
        return tuple(self.names)

    @contextmanager
    def site(self, changes: Changes) -> Iterator[Site]:
        """Yield where A with some settings of B runs: beside what the user's environment sets."""
        settings = dict(self.good)
        for at in (self.names[name] for name in changes):
            settings.pop(at, None)
            settings |= {at: self.bad[at]} if at in self.bad else {}
        found: dict[str, list[str]] = {}
        for (variable, _), text in settings.items():
            found.setdefault(variable, [os.environ[variable]] if variable in LISTS and variable in os.environ else [])
            found[variable].append(text)
        yield Site(variables={variable: " ".join(texts) for variable, texts in found.items()})


def flag_sides(good: str, bad: str) -> FlagSides:
    """Return what two texts set, such as ``XLA_FLAGS="--a --b=1" jax_enable_x64=1``; raises UserError."""
    a, b = parse_flags(good), parse_flags(bad)
    names = {
        b[at] if at in b and at[1] else f"{at[0]}={b[at]}" if at in b else f"without {at[1] or at[0]}": at
        for at in dict.fromkeys((*a, *b))
        if a.get(at) != b.get(at)
    }
    if not names:
        raise UserError("--good and --bad set the same: nothing to bisect")
    return FlagSides(a, b, names)


def parse_flags(text: str) -> Settings:
    """Return the settings of a text; raises UserError for what sets nothing that is known."""
    found: Settings = {}
    for word in _words(text):
        variable, equals, held = word.partition("=")
        if not equals or not variable:
            raise UserError(f'{word!r} sets nothing: write XLA_FLAGS="--flag=value …" or jax_name=value')
        if variable in LISTS:
            found |= {(variable, flag.partition("=")[0]): flag for flag in held.split()}
        elif variable.startswith("jax_"):
            if not hasattr(jax.config, variable):
                raise UserError(f"{variable} is no name of jax.config here (JAX {jax.__version__})")
            found[variable.upper(), ""] = held
        else:
            found[variable, ""] = held
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r}: {error}") from None
