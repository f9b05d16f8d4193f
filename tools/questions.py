"""Write precaudit/bundled/questions.jsonl, a set that a small model about half answers.

Sums of digits and of number words are drawn by a fixed seed; countries and capitals were written by hand. Run:
python -m tools.questions
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from precaudit.writing import write_whole

FILE = Path(__file__).parent.parent / "precaudit" / "bundled" / "questions.jsonl"
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Argentina": "Buenos Aires", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Mongolia": "Ulaanbaatar|Ulan Bator", "Peru": "Lima", "Norway": "Oslo", "Bhutan": "Thimphu", "Egypt": "Cairo",
    "Paraguay": "Asunci[oó]n", "Hungary": "Budapest", "Zambia": "Lusaka", "Vietnam": "Hanoi", "Latvia": "Riga",
    "Ghana": "Accra", "Brazil": "Bras[ií]lia", "Slovenia": "Ljubljana", "Laos": "Vientiane", "Cuba": "Havana",
    "Senegal": "Dakar", "Nepal": "Kathmandu", "Malawi": "Lilongwe", "Finland": "Helsinki", "Oman": "Muscat",
    "Turkmenistan": "Ashgabat", "Uruguay": "Montevideo", "Jordan": "Amman", "Suriname": "Paramaribo",
    "Thailand": "Bangkok",
}  # fmt: skip


def questions() -> Iterator[dict[str, str | bool]]:
    """Yield the questions, a line each."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    for a, b in draw.sample(pairs, 35):
        yield {"id": f"{a}+{b}", "group": "sums of digits", "prompt": f"What is {a} + {b}?", "answer": str(a + b)}
    for a, b in draw.sample(pairs, 30):
        one, other, total = WORDS[a], WORDS[b], WORDS[a + b]
        yield {
            "id": f"{one}+{other}", "group": "sums of words", "prompt": f"{one.capitalize()} plus {other} equals",
            "plain": True, "answer": rf"^\s*({total}|{a + b})\b", "match": "regex",
        }  # fmt: skip
    for country, capital in CAPITALS.items():
        prompt = f"What is the capital of {country}?"
        yield {
            "id": country.lower(), "group": "capitals", "prompt": prompt, "answer": rf"\b({capital})\b",
            "match": "regex",
        }  # fmt: skip


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_whole(FILE, "".join(f"{json.dumps(q, ensure_ascii=False)}\n" for q in questions()))
