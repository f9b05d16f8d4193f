"""Bisection by passes: those of XLA that change a program, each of which the compiler can be told to leave out."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.processes import Site, run_module
from precaudit.errors import UserError
from precaudit.writing import write_whole

ON, OFF = "on", "off"  # what a side is: all passes as XLA runs them, or none of those that it can do without
DUMPED = re.compile(r"\.(?P<pipeline>[\w-]+)\.after_(?P<name>[\w-]+)\.before_[\w-]+\.txt$")
TEXT = "after_optimizations.txt"  # the end of a compiled module's name
KEPT = "passes.txt"


@dataclass(frozen=True)
class PassSides:
    """Passes that XLA can do without; a change leaves one out, or takes one in where A is without all."""

    names: tuple[str, ...]
    from_on: bool

    @property
    def changes(self) -> Changes:
        """What B does otherwise, by pass."""
        return tuple(f"{'without' if self.from_on else 'with'} {name}" for name in self.names)

    @contextmanager
    def site(self, changes: Changes) -> Iterator[Site]:
        """Yield where A with some changes runs."""
        made = {c.partition(" ")[2] for c in changes}
        off = [name for name in self.names if (name in made) == self.from_on]
        yield without_passes(off)


def without_passes(names: Sequence[str]) -> Site:
    """Return where a process compiles without some passes."""
    return with_flags(Site(), f"--xla_disable_hlo_passes={','.join(names)}" if names else "")


def with_flags(site: Site, flags: str) -> Site:
    """Return a site whose processes have more of XLA_FLAGS, and compile anew."""
    before = site.variables.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    more = {"XLA_FLAGS": f"{before} {flags}".strip(), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return Site(site.python, site.where, {**site.variables, **more})


def dumped_files(site: Site, arguments: Sequence[str], flags: str, into: Path) -> list[Path]:
    """Return the files that XLA writes into a folder as a command of ours compiles."""
    run_module(with_flags(site, f"--xla_dump_to={into} --xla_dump_hlo_as_text {flags}"), arguments)
    return sorted(into.rglob("*.txt"))


def pass_sides(good: str, bad: str, arguments: Sequence[str], folder: Path, force: bool) -> PassSides:
    """Return the passes that a command's programs are changed by, and that it compiles without, all of them at once.

    ``arguments``: the command, without a folder. Those of an earlier bisection in ``folder`` are read again.
    """
    if {good, bad} != {ON, OFF}:
        raise UserError("--by passes: give --good on --bad off (passes left out break it), or --good off --bad on")
    kept = folder / KEPT
    if kept.is_file() and not force:
        return PassSides(tuple(kept.read_text().split()), good == ON)
    with TemporaryDirectory(prefix="precaudit-") as made:
        run = Path(made).resolve() / "run"
        asked = [*arguments, "-o", str(run), "--force"]
        names = passes_in(dumped_files(Site(), asked, "--xla_dump_hlo_pass_re=.*", Path(made).resolve() / "dump"))

        def compiles(off: Sequence[str]) -> bool:
            try:
                run_module(without_passes(off), asked)
            except UserError:
                return False
            return True

        found = most_together(names, compiles)
    if not found:
        raise UserError("--by passes: no pass that changes the program can be left out")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(kept, "".join(f"{name}\n" for name in found))
    return PassSides(found, good == ON)


def passes_in(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the names of the passes that changed a module, by XLA's files; not those of whole pipelines."""
    read = [m for m in (DUMPED.search(f.name) for f in files) if m is not None]
    pipelines = {m["pipeline"] for m in read} | {"pipeline-start"}
    return tuple(dict.fromkeys(m["name"] for m in read if m["name"] not in pipelines))


def most_together(names: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return names that hold together, none of which can be added: tried by halves, since few do not."""
    found: list[str] = []

    def add(some: Sequence[str]) -> None:
        if holds([*found, *some]):
            found.extend(some)
        elif len(some) > 1:
            add(some[: len(some) // 2])
            add(some[len(some) // 2 :])

    add(names)
    return tuple(name for name in names if name in found)
