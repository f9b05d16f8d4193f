"""Questions with answers: reading them, what a text answers, and how many a policy gets right."""

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from precaudit.checks.rollouts.answers import Paired, Rate, pair_answers, pass_at
from precaudit.errors import UserError
from precaudit.schema.prompts import Message, NoTemplate, Prompt, encode_prompt
from precaudit.schema.records.base import Record
from precaudit.schema.records.runs import PromptRecord

FORM = '{"prompt": "What is 2 + 3?", "answer": "5"}'
FINAL = "####"  # before the answer of a GSM8K solution (Cobbe et al. 2021)
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")
Match = Literal["number", "exact", "regex"]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of questions.

    ``match``: how a text is held to ``answer``: its last ``number``, ``exact``, or a ``regex`` that is found in it; by
    default ``number`` where the answer is one, else ``exact``. ``plain``: asked as it stands, without the model's chat
    template. ``group``: what is counted apart.
    """

    prompt: str
    answer: str
    id: str = ""
    match: Match | None = None
    group: str = ""
    plain: bool = False

    @property
    def final(self) -> str:
        """The answer without the solution before it."""
        return self.answer.rpartition(FINAL)[2].strip()

    @property
    def how(self) -> Match:
        """How a text is held to the answer."""
        return self.match or ("exact" if last_number(self.final) is None else "number")


class Answers(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="answers"):
    """What a policy answered: pass@1 and, of n sequences a question, pass@n; ``unparsed``: sequences without a number.

    ``groups``: {group: (right, sequences)}. ``marks``: {question: whether its first sequence is right}.
    """

    policy: str
    questions: int
    n: int
    rates: tuple[Rate, ...]
    unparsed: int
    groups: dict[str, tuple[int, int]]
    marks: dict[str, bool]


class Changed(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="paired"):
    """A policy's answers against the first's, question by question: of each its first sequence."""

    policy: str
    against: str
    paired: Paired


class HeldAnswers(NamedTuple):
    """What a limit said of a policy's answers against the first's, by the interval of their difference."""

    changed: Changed
    limit: float
    status: Literal["pass", "fail", "unknown"]


def read_questions(path: Path) -> list[Question]:
    """Read JSONL of questions; raises UserError with the line of one that cannot be asked or judged."""
    if not path.is_file():
        raise UserError(f"no questions file at {path}")
    found: dict[str, Question] = {}
    for i, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{i}"
        try:
            q = msgspec.json.decode(line, type=Question)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{where}: {error}; a line is like {FORM}") from None
        q = msgspec.structs.replace(q, id=q.id or f"line {i}")
        _check(q, where)
        if q.id in found:
            raise UserError(f"{where}: question id {q.id!r} is used twice")
        found[q.id] = q
    if not found:
        raise UserError(f"{path}: no question in it; a line is like {FORM}")
    return list(found.values())


def _check(q: Question, where: str) -> None:
    if not q.prompt.strip() or not q.final:
        raise UserError(f"{where}: the {'answer' if q.prompt.strip() else 'prompt'} is empty")
    if q.how == "number" and last_number(q.final) is None:
        raise UserError(f"{where}: the answer {q.final[:40]!r} is no number; give match exact or regex")
    if q.how == "regex":
        try:
            re.compile(q.final)
        except re.error as error:
            raise UserError(f"{where}: the answer {q.final[:40]!r} is no regular expression: {error}") from None


def question_prompts(questions: Sequence[Question], tokenizer: Any) -> list[PromptRecord]:
    """Return the questions' token ids: as a user's message where the model has a chat template, else as they stand."""
    found = []
    for q in questions:
        chat = Prompt(q.id, messages=(Message("user", q.prompt),))
        try:
            text, tokens = encode_prompt(Prompt(q.id, prompt=q.prompt) if q.plain else chat, tokenizer)
        except NoTemplate:
            text, tokens = encode_prompt(Prompt(q.id, prompt=q.prompt), tokenizer)
        found.append(PromptRecord(id=q.id, text=text, tokens=tokens))
    return found


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, commas left out; None where there is none."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:
        return None


def right(q: Question, text: str) -> bool | None:
    """Return whether a text answers a question; None where a number is wanted and none is in it."""
    if q.how == "number":
        said = last_number(text)
        return None if said is None else said == last_number(q.final)
    return text.strip() == q.final if q.how == "exact" else re.search(q.final, text) is not None


def read_answers(policy: str, questions: Sequence[Question], texts: Sequence[Sequence[str]]) -> Answers:
    """Return what a policy's texts, n of each question, are worth. A text without a number is counted as wrong."""
    marks = [[right(q, text) for text in some] for q, some in zip(questions, texts, strict=True)]
    correct, samples = [sum(m is True for m in some) for some in marks], [len(some) for some in marks]
    total, good = Counter[str](), Counter[str]()
    for q, some, count in zip(questions, marks, correct, strict=True):
        total[q.group] += len(some)
        good[q.group] += count
    n = min(samples)
    return Answers(
        policy=policy,
        questions=len(questions),
        n=n,
        rates=tuple(pass_at(correct, samples, k) for k in sorted({1, n})),
        unparsed=sum(m is None for some in marks for m in some),
        groups={name: (good[name], total[name]) for name in total},
        marks={q.id: some[0] is True for q, some in zip(questions, marks, strict=True)},
    )


def changed_answers(
    policy: str,
    against: str,
    questions: Sequence[Question],
    texts: Sequence[Sequence[str]],
    before: Sequence[Sequence[str]],
) -> Changed:
    """Return a policy's answers against another's: of each question the first text."""
    one, other = (
        [right(q, some[0]) is True for q, some in zip(questions, given, strict=True)] for given in (before, texts)
    )
    return Changed(policy=policy, against=against, paired=pair_answers(one, other))
