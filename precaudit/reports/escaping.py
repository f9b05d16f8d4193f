"""Text of others, prompt ids and names among it, made safe for where it goes: one function a place.

What a run, a checkpoint or a prompts file holds may be meant for a terminal's escapes, for GitHub's command stream, or
for the HTML of a page. Nothing is lost: what could act is shown as what it is.
"""

import re
import unicodedata

# Markdown and GitHub's additions: markup, HTML, links, images, mentions and references
_MARKUP = re.compile(r"[\\`*\[\]|<>~]|^[ \t]*(?:[#+=-]|\d+[.)])|://|www\.|@|(?<=\w)#(?=\d)|&", re.MULTILINE)
_COMMAND = re.compile(r"::(?=\w)|##(?=\[)")
_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def terminal(text: str) -> str:
    r"""Return one line: control and direction characters as ``\x1b`` and the like, none left to act.

    ``::`` and ``##[`` would begin a workflow command where a line is broken before them.
    """
    shown = "".join(c if c.isprintable() else _named(c) for c in text)
    return _COMMAND.sub(lambda m: f"{m[0][0]}\\x{ord(m[0][1]):x}", shown)


def workflow(text: str) -> str:
    """Return the message of a workflow command (``::error::message``): one line, percent signs as %25."""
    return terminal(text).replace("%", "%25")


def xml(text: str) -> str:
    r"""Return text that XML 1.0 can hold: other characters as ``\x0b``; markup is left to the writer."""
    return _XML.sub(lambda m: _named(m[0]), text)


def markdown(text: str) -> str:
    """Return one line of Markdown that shows ``text``: no markup, HTML, link, image, mention or table cell in it."""
    shown = "".join(c if c.isprintable() else _named(c) for c in text)
    return _MARKUP.sub(lambda m: "".join(f"&#{ord(c)};" if not c.isalnum() else c for c in m[0]), shown)


def code(text: str) -> str:
    """Return a Markdown code span that shows ``text``."""
    shown = "".join(c if c.isprintable() else _named(c) for c in text).replace("`", "'").strip()
    return f"`{shown}`" if shown else "` `"


def _named(c: str) -> str:
    """Return a character's escape as Python writes it."""
    if unicodedata.category(c) == "Zs":
        return " "
    return c.encode("unicode_escape").decode("ascii")
