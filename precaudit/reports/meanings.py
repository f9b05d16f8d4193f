"""What the words and headings of a page mean, in a sentence each."""

from precaudit.schema.glossary import headings, lookup_key, terms_by_name

OWN = {
    "top-1": "The token with the largest logit.",
    "bit-equal": "Records that come out bit for bit as the equations round.",
    "unexplained": "What the best emulation does not explain of an error, in unit roundoffs of the format.",
    "margin": "Top-1 minus top-2 logit: here how far it is from FP64's.",
    "price": "What a change costs: time, or bytes of its results.",
}
ALIASES = {
    "NaN or inf": "NaN",
    "in u": "u",
    "bit-equal records": "bit-equal",
    "KL before": "KL",
    "KL after": "KL",
    "gain of a change": "gain",
    "explained by": "explained",
}
SHOWN = (
    "local",
    "forward",
    "limit",
    "unexplained",
    "explained",
    "excess",
    "componentwise",
    "gain",
    "ratio",
    "u",
    "KL",
    "mae",
    "max_diff",
    "rel_l2",
    "NaN",
    "gap",
    "top-1",
    "near tie",
    "match",
    "FP64",
    "bit-equal",
    "input suspect",
    "margin",
    "flips",
    "share",
    "price",
)


def meaning(word: str) -> str:
    """Return the sentence on a word, empty where there is none."""
    name = ALIASES.get(word, word)
    key = lookup_key(name)
    found = terms_by_name().get(key) or headings().get(key)
    return OWN[name] if name in OWN else found[0].meaning.replace("`", "") if found else ""
