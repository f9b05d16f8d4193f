"""Text read from left to right: blanks, names, integers, strings and what stands in brackets. Linear in its length."""

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import NoReturn

from precaudit.errors import UserError

DEEPEST = 32  # types and brackets inside each other
_BLANK = re.compile(r"(?:\s++|/\*.*?\*/)*+", re.DOTALL)
NAME = re.compile(r"%?([A-Za-z0-9_][\w.\-]*+)", re.ASCII)
KEY = re.compile(r"([\w.\-]++)\s*+=", re.ASCII)
INTEGER = re.compile(r"-?[0-9]{1,18}(?![0-9])")
STRING = re.compile(r'"((?:[^"\\\n]++|\\.)*+)"')
_ESCAPE = re.compile(r"\\(.)")
_PLAIN = re.compile(r'(?:[^][(){}",\n]++|"(?:[^"\\\n]++|\\.)*+")*+')
_NESTED = re.compile(r'(?:[^][(){}"]++|"(?:[^"\\\n]++|\\.)*+")*+')
_FIELD = re.compile(r'([\w.\-]++)=("(?:[^"\\\n]++|\\.)*+"|\{[^{}]*+\}|[^\s{}",]*+)', re.ASCII)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class HloError(UserError):
    """HLO text that cannot be read; the message begins with the line."""


class Scanner:
    """A text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.ends = [found.start() for found in re.finditer("\n", text)]

    def line(self) -> int:
        """Return the line it stands on, from 1."""
        return bisect_left(self.ends, self.at) + 1

    def fail(self, what: str) -> NoReturn:
        """Raise HloError of this line."""
        raise HloError(f"line {self.line()}: {what}")

    def here(self) -> str:
        """Say what stands here."""
        words = self.text[self.at : self.at + 24].split("\n")[0]
        return repr(words) if words else "the end of the line" if self.at < len(self.text) else "the end of the text"

    def blank(self) -> None:
        """Pass over blanks, ends of lines and comments."""
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """Pass over blanks and what the pattern matches; return it (its first group, if it has one)."""
        self.blank()
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[pattern.groups and 1]

    def need(self, pattern: re.Pattern[str], what: str) -> str:
        """Return what ``take`` does. Raises HloError where it is not there."""
        taken = self.take(pattern)
        return self.fail(f"{what} should stand where {self.here()} stands") if taken is None else taken

    def accept(self, literal: str) -> bool:
        """Pass over a word, if it stands here."""
        self.blank()
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> None:
        """Pass over a word. Raises HloError where it is not there."""
        if not self.accept(literal):
            self.fail(f"{literal!r} should stand where {self.here()} stands")

    def name(self) -> str:
        """Read a name, with or without its percent sign."""
        return self.need(NAME, "a name")

    def integer(self) -> int:
        """Read an integer of at most 18 digits."""
        return int(self.need(INTEGER, "an integer"))

    def many(self, close: str, read: Callable[[], None]) -> None:
        """Read what is separated by commas, up to and with the closing bracket."""
        if self.accept(close):
            return
        read()
        while self.accept(","):
            read()
        self.expect(close)

    def nested_text(self, opened: str = "") -> str:
        """Return the text up to a comma or the end of the line, outside brackets; or up to what closes ``opened``."""
        start, waiting = self.at, [_BRACKETS[opened]] if opened else []
        while True:
            found = (_NESTED if waiting else _PLAIN).match(self.text, self.at)
            self.at = found.end() if found else self.at
            here = self.text[self.at : self.at + 1]
            if here in _BRACKETS and len(waiting) < DEEPEST:
                waiting.append(_BRACKETS[here])
            elif waiting and here == waiting[-1]:
                waiting.pop()
                if opened and not waiting:
                    self.at += 1
                    return self.text[start : self.at - 1]
            elif not waiting and here in ("", ",", "\n"):
                return self.text[start : self.at]
            else:
                closes = f"{waiting[-1]!r} should stand" if waiting else "an attribute should end"
                self.fail(f"{closes} where {self.here()} stands")
            self.at += 1


def unescape(text: str) -> str:
    """Return what a string written with backslashes says."""
    return _ESCAPE.sub(r"\1", text) if "\\" in text else text


def braced_fields(text: str) -> dict[str, str]:
    """Return the parts of ``{key=value key=value}``; of what is not written so, those that are."""
    found = ((key, STRING.fullmatch(value), value) for key, value in _FIELD.findall(text))
    return {key: unescape(string[1]) if string else value for key, string, value in found}


def integer(text: str) -> int:
    """Return the integer a text is, 0 for another."""
    return int(text) if INTEGER.fullmatch(text) else 0
