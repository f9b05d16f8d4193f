"""Text of others, prompt ids and names among it, made safe for where it goes: one function a place.

What a run, a checkpoint or a prompts file holds may be meant for a terminal's escapes, for GitHub's command stream, or
for the HTML of a page. Nothing is lost: what could act is shown as what it is.
"""

import json
import re
import unicodedata
from html import escape
from typing import Any

from precaudit.mirrors import by_url

# Markdown and GitHub's additions: markup, HTML, links, images, mentions and references. A bracket acts at the beginning
# of a line and before ( or [, a mark of a list or a heading before a space; a number is none.
# CommonMark 0.31, §4.2, §4.7, §5.2, §6.3.
_MARKUP = re.compile(
    r"[\\`*|<>~]|\](?=[(\[])|^[ \t]*\["
    r"|^[ \t]*(?:(?:#{1,6}|[+-]|\d{1,9}[.)])(?=[ \t]|$)|[=-]+(?=[ \t]*$)|(?:_[ \t]*){3,}$)"
    r"|://|www\.|@|(?<=\w)#(?=\d)|&",
    re.MULTILINE,
)
_COMMAND = re.compile(r"::(?=\w)|##(?=\[)")
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\r\n]")
_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plain(text: str) -> str:
    r"""Return one line: control and direction characters as ``\x1b`` and the like; markup is left as it is.

    What lies in a bucket is named by its URL.
    """
    return "".join(c if c.isprintable() else _escape_of(c) for c in by_url(text))


def terminal_line(text: str) -> str:
    r"""Return one line: control and direction characters as ``\x1b`` and the like, none left to act.

    ``::`` and ``##[`` would begin a workflow command where a line is broken before them.
    """
    shown = plain(text)
    return _COMMAND.sub(lambda m: f"{m[0][0]}\\x{ord(m[0][1]):x}", shown)


def workflow(text: str) -> str:
    """Return the message of a workflow command (``::error::message``): one line, percent signs as %25."""
    return terminal_line(text).replace("%", "%25")


def workflow_property(text: str) -> str:
    """Return the value of a property of a workflow command (``file=…``): as ``workflow``, no colon or comma."""
    return workflow(text).replace(":", "%3A").replace(",", "%2C")


def csv_cell(text: str) -> str:
    """Return a cell of a table that a spreadsheet shows as text: what would begin a formula has an apostrophe before.

    OWASP, "CSV Injection": = + - @, their full-width forms, tab and carriage return, also after spaces.
    """
    shown = "".join(c if c.isprintable() else _escape_of(c) for c in text)
    return f"'{shown}" if _FORMULA.match(text) else shown


def xml(text: str) -> str:
    r"""Return text that XML 1.0 can hold: other characters as ``\x0b``; markup is left to the writer."""
    return _XML.sub(lambda m: _escape_of(m[0]), text)


def escape_markdown(text: str) -> str:
    """Return one line of Markdown that shows ``text``: no markup, HTML, link, image, mention or table cell in it."""
    shown = plain(text)
    return _MARKUP.sub(lambda m: "".join(f"&#{ord(c)};" if not c.isalnum() else c for c in m[0]), shown)


def code_span(text: str) -> str:
    """Return a Markdown code span that shows ``text``."""
    shown = plain(text).replace("`", "'").strip()
    return f"`{shown}`" if shown else "` `"


def escape_html(text: str) -> str:
    """Return HTML, of an element or a quoted attribute, that shows ``text``: one line, no markup, no command."""
    return _COMMAND.sub(lambda m: f"{m[0][0]}&#{ord(m[0][1])};", escape(plain(text)))


def script(data: object) -> str:
    """Return JSON that a script element may hold: nothing in it ends the element or begins a comment."""
    found = json.dumps(_plain_data(data), separators=(",", ":"), allow_nan=False)
    for c in "<>&'":
        found = found.replace(c, f"\\u{ord(c):04x}")
    return _COMMAND.sub(lambda m: f"{m[0][0]}\\u{ord(m[0][1]):04x}", found)


def _plain_data(data: object) -> Any:
    """Return data with every text in it as ``plain`` shows it."""
    if isinstance(data, str):
        return plain(data)
    if isinstance(data, dict):
        return {plain(k): _plain_data(v) for k, v in data.items()}
    return [_plain_data(v) for v in data] if isinstance(data, list | tuple) else data


def _escape_of(c: str) -> str:
    """Return a character's escape as Python writes it."""
    if unicodedata.category(c) == "Zs":
        return " "
    return c.encode("unicode_escape").decode("ascii")
