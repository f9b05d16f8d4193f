"""What the verbs take by keyword, as on the command line: ``layers="0"``, ``points=["q", "k"]``, ``force=True``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from precaudit.errors import UserError, nearest
from precaudit.progress import Advance, Progress
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection, Texts, filter_text

FILTERS = ("layers", "points", "phases", "positions", "prompt")
Keywords = dict[str, Any]


def check_keywords(verb: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for a keyword that a verb does not take, with the nearest that it takes."""
    for name in given:
        if name not in known:
            raise UserError(f"precaudit.{verb} takes no {name!r}{nearest(name, known)}")


def given_keywords(verb: str, call: Mapping[str, Any], *own: str) -> Keywords:
    """Return the keywords of a verb's call (its ``locals()``) that were given and are not None, but for its ``own``.

    Raises UserError for one that no call of the verb takes: what its ``unknown`` holds.
    """
    known = {name: x for name, x in call.items() if name not in (*own, "unknown")}
    check_keywords(verb, call["unknown"], known)
    return {name: x for name, x in known.items() if x is not None}


def take_keywords(keywords: Keywords, names: Iterable[str]) -> Keywords:
    """Return the keywords of some names that were given, and take them out."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def option_names(options: type) -> tuple[str, ...]:
    """Return the fields of an options record which are keywords, too."""
    return tuple(f.name for f in fields(options) if f.metadata.get("keyword", True))


def options_of(kind: type, before: Any, keywords: Keywords, default: Any) -> Any:
    """Return an options record: ``before``, else ``default``, with the keywords that are its fields taken out."""
    given = take_keywords(keywords, option_names(kind))
    if given and before is not None:
        raise UserError(f"give options= or {', '.join(f'{name}=' for name in given)}, not both")
    return replace(default, **given) if before is None else before


def selection(before: Selection | None, keywords: Keywords, requested: Any = None) -> Selection | None:
    """Return what filters select, taken out of the keywords; None without any.

    ``requested``: of a recorded run, whose points and phases a filter leaves as they are unless it names others.
    """
    given = take_keywords(keywords, FILTERS)
    chosen = {name: x for name, x in given.items() if x is not None}
    if not chosen:
        return before
    if before is not None:
        raise UserError(f"give select= or {', '.join(f'{name}=' for name in chosen)}, not both")
    texts = {name: filter_text(name, chosen.get(name)) for name in FILTERS[:-1]}
    if requested is not None:
        texts["points"] = texts["points"] or ",".join(requested.points)
        texts["phases"] = texts["phases"] or ",".join(requested.phases)
    ids = chosen.get("prompt")
    made = Selection.parse(**texts, prompts=ids if isinstance(ids, str) else None)
    return made if ids is None or isinstance(ids, str) else replace(made, prompts=tuple(ids))


def prompts_of(given: object) -> Any:
    """Return prompts with texts as Prompts: a list of texts is ``p0``, ``p1`` …; {id: text} names them."""
    if isinstance(given, Mapping):
        return [Prompt(id=str(name), prompt=text) for name, text in given.items()]
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    return [Prompt(id=f"p{i}", prompt=x) if isinstance(x, str) else x for i, x in enumerate(given)]


def accumulations(given: Texts) -> tuple[str, ...]:
    """Return formats to emulate sums in, given as a list or as on the command line (``none``: no emulation)."""
    if isinstance(given, str):
        return () if given == "none" else tuple(x.strip() for x in given.split(",") if x.strip())
    return tuple(map(str, given)) if isinstance(given, Iterable) else (str(given),)


@contextmanager
def progress_of(given: Progress | Advance | bool | None) -> Iterator[Progress]:
    """Yield where work reports to: nowhere (False, None), a bar (True), or where it was told to."""
    if isinstance(given, Progress):
        yield given
    elif callable(given):
        yield Progress(advance=given)
    elif given:
        from precaudit.reports.bar import bar

        with bar() as progress:
            yield progress
    else:
        yield Progress()


def looking(run: Any, keywords: Keywords, default: Any) -> tuple[Any, Any, Any]:
    """Return a run, opened where filters need what it holds, and what select and options of it the keywords make."""
    from precaudit.recording.runs.reader import Run, open_run

    if "accum" in keywords:
        keywords["accum"] = accumulations(keywords["accum"])
    options = options_of(type(default), keywords.pop("options", None), keywords, default)
    before = keywords.pop("select", None)
    if before is None and any(keywords.get(name) is not None for name in FILTERS):
        run = run if isinstance(run, Run) else open_run(run, options.partial)
    return run, selection(before, keywords, run.record.requested if isinstance(run, Run) else None), options
