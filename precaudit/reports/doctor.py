"""A checkup as text: one screen of 80 columns, what is broken first."""

from collections.abc import Iterator
from textwrap import wrap

from precaudit.checks.doctor.caches import SAYS, Cleared
from precaudit.checks.doctor.checkup import Checkup

LABEL = 12


def lines(c: Checkup, width: int | None) -> Iterator[str]:
    """Yield a checkup's lines, wrapped to ``width`` (None: not)."""
    for text in c.broken:
        yield from _row("✗", text, width, 2)
    if not c.broken:
        yield "✓ what precaudit needs is here"
    yield from _row("versions", ", ".join(f"{k} {v}" for k, v in c.versions.items()), width)
    devices = ", ".join(f"{n} × {kind}" for kind, n in c.devices.items()) or "none: JAX does not start"
    yield from _row("devices", devices, width)
    for text in c.heard if c.devices else ():
        yield from _row("", f"JAX says: {text}", width)
    yield from _caches(c, width)
    free = ", ".join(f"{'?' if n is None else _size(n)} in {folder}" for folder, n in c.disk.items())
    yield from _row("disk free", free, width)
    yield from _row("memory", ", ".join(f"{_size(n)} {what}" for what, n in c.memory.items()) or "?", width)
    for i, text in enumerate(c.sums):
        yield from _row("" if i else "sums", text, width)
    yield from _extras(c, width)
    yield from _row("terminal", ", ".join(f"{k} {v}" for k, v in c.terminal.items()), width)
    line, file = c.completion
    yield from _row("completion", f"{line}  # in {file}", width)
    for i, text in enumerate(c.lacking):
        yield from _row("" if i else "not here", text, width)


def cleared(found: Cleared) -> str:
    """Say what clearing a cache freed."""
    text = f"{found.kind}: {_size(found.bytes)} freed, {found.files} files in {found.folder}"
    return f"{text}; {len(found.kept)} could not be deleted, first {found.kept[0]}" if found.kept else text


def _caches(c: Checkup, width: int | None) -> Iterator[str]:
    for i, kept in enumerate(c.caches):
        own = "" if kept.ours else " (JAX_COMPILATION_CACHE_DIR: not ours, not cleared)"
        text = f"{_size(kept.bytes)} of {SAYS[kept.kind]}, {kept.files} files in {kept.folder}{own}"
        yield from _row("" if i else "caches", text, width)


def _extras(c: Checkup, width: int | None) -> Iterator[str]:
    there = [x.name for x in c.extras if x.installed]
    yield from _row("extras", f"installed: {', '.join(there) or 'none'}", width)
    if absent := [x for x in c.extras if not x.installed]:
        names = ", ".join(x.name for x in absent)
        yield from _row("", f"not installed: {names}; for one: {absent[0].line}", width)


def _row(label: str, text: str, width: int | None, column: int = LABEL) -> list[str]:
    """Return ``label  text``, the text hanging beside its label; paths and commands are never cut."""
    if width is None:
        return [f"{label:{column}}{text}"]
    return wrap(text, max(width, 40), initial_indent=f"{label:{column}}", subsequent_indent=" " * column,
                break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _size(n: int) -> str:
    """Return bytes with three digits at most."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n} B"
