"""A checkup as text: one screen of 80 columns, what is broken first."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.doctor.caches import SAYS, CacheFolder, Cleared
from precaudit.checks.doctor.checkup import Checkup
from precaudit.numbers.bytes_text import bytes_text
from precaudit.reports.report import Headline, Report, Section


def checkup_report(c: Checkup) -> Report:
    """Return the report of a checkup: what is broken first, then one screen of what is here."""
    broken = [Headline("✗", text) for text in c.broken]
    first, *more = broken or [Headline("✓", "what precaudit needs is here")]
    return Report(first, (Section(lines=tuple(h.text for h in more)), Section(facts=tuple(_facts(c)))), records=(c,))


def cleared_report(found: Sequence[Cleared]) -> Report:
    """Return what clearing caches freed."""
    return Report(None, (Section(lines=tuple(map(_cleared_text, found))),), records=(found,))


def _facts(c: Checkup) -> Iterator[tuple[str, str]]:
    yield "versions", ", ".join(f"{k} {v}" for k, v in c.versions.items())
    yield "devices", ", ".join(f"{n} × {kind}" for kind, n in c.devices.items()) or "none: JAX does not start"
    yield from (("", f"JAX says: {text}") for text in (c.heard if c.devices else ()))
    yield from _list_rows("caches", map(_cache_text, c.caches))
    yield "disk free", ", ".join(f"{'?' if n is None else bytes_text(n)} in {folder}" for folder, n in c.disk.items())
    yield "memory", ", ".join(f"{bytes_text(n)} {what}" for what, n in c.memory.items()) or "?"
    yield from _list_rows("sums", c.sums)
    yield "extras", f"installed: {', '.join(x.name for x in c.extras if x.installed) or 'none'}"
    if absent := [x for x in c.extras if not x.installed]:
        yield "", f"not installed: {', '.join(x.name for x in absent)}; for one: {absent[0].line}"
    yield "terminal", ", ".join(f"{k} {v}" for k, v in c.terminal.items())
    line, file = c.completion
    yield "completion", f"{line}  # in {file}"
    yield from _list_rows("not here", c.lacking)


def _list_rows(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield from (("" if i else name, text) for i, text in enumerate(texts))


def _cache_text(kept: CacheFolder) -> str:
    own = "" if kept.ours else " (JAX_COMPILATION_CACHE_DIR: not ours, not cleared)"
    return f"{bytes_text(kept.bytes)} of {SAYS[kept.kind]}, {kept.files} files in {kept.folder}{own}"


def _cleared_text(found: Cleared) -> str:
    """Say what clearing a cache freed."""
    text = f"{found.kind}: {bytes_text(found.bytes)} freed, {found.files} files in {found.folder}"
    return f"{text}; {len(found.kept)} could not be deleted, first {found.kept[0]}" if found.kept else text
