"""Prompts: texts, chat messages or token ids, from JSONL or the command line."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from precaudit.errors import UserError


class NoTemplate(UserError):
    """A chat prompt that the model's chat template, or a model without one, does not take."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a prompts file: ``id`` and one of ``prompt`` (text), ``messages`` (chat) or ``tokens`` (ids)."""

    id: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None


def shipped_prompts() -> list[Prompt]:
    """Return the prompts that come with the package."""
    path = resources.files("precaudit") / "bundled" / "prompts.jsonl"
    return parse_prompts(path.read_bytes(), "prompts.jsonl")


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSONL file of prompts; raises UserError naming file and line."""
    if not path.is_file():
        raise UserError(f"no prompts file at {path}")
    return parse_prompts(path.read_bytes(), str(path))


def parse_prompts(data: bytes, where: str) -> list[Prompt]:
    """Parse JSONL; raises UserError for a broken line, a double id, or a line with no or two contents."""
    found: dict[str, Prompt] = {}
    for i, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{where}:{i}: {error}; a line is like {{'id': 'p1', 'prompt': 'Hello'}}") from None
        if (prompt.prompt is not None) + (prompt.messages is not None) + (prompt.tokens is not None) != 1:
            raise UserError(f"{where}:{i}: prompt {prompt.id!r} needs exactly one of prompt, messages, tokens")
        if prompt.id in found:
            raise UserError(f"{where}:{i}: prompt id {prompt.id!r} is used twice")
        found[prompt.id] = prompt
    if not found:
        raise UserError(f"{where}: no prompt in it")
    return list(found.values())


def encode_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """Return (text, token ids); chat messages go through the model's chat template.

    Raises UserError for an empty prompt or a model without a template.
    """
    if prompt.tokens is not None:
        return "", prompt.tokens
    if prompt.messages is not None:
        turns = [{"role": m.role, "content": m.content} for m in prompt.messages]
        try:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are the model's own programs and raise what they like
            reason = str(error).strip().splitlines()
            raise NoTemplate(
                f"prompt {prompt.id!r}: the model's chat template does not take it"
                f" ({reason[0] if reason else type(error).__name__}); give it as text or as token ids: "
                f'{{"id": "{prompt.id}", "tokens": [1, 2, 3]}}'
            ) from None
        return str(text), tuple(tokenizer.encode(text, add_special_tokens=False))
    text = prompt.prompt or ""
    if not text.strip():
        raise UserError(f"prompt {prompt.id!r}: the text is empty")
    return text, tuple(tokenizer.encode(text))


def check_tokens(name: str, tokens: Sequence[int], more: int, vocab: int, context: int) -> None:
    """Raise UserError where a prompt has no token, one outside the vocabulary, or does not fit the context."""
    if not tokens:
        raise UserError(f"prompt {name!r}: it is empty: the tokenizer makes no token of it")
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise UserError(f"prompt {name!r}: token id {token} at position {i} is outside the vocabulary of {vocab}")
    if len(tokens) + more > context:
        steps = f" and {more} decode steps" if more else ""
        raise UserError(
            f"prompt {name!r}: {len(tokens)} tokens{steps} are longer than the model's context of {context}"
        )
