"""What projections are by the words of their names."""

import re

ROLES = {
    "q": ("q", "query", "queries", "wq"),
    "k": ("k", "key", "keys", "wk"),
    "v": ("v", "value", "values", "wv"),
    "gate": ("gate", "wgate"),
    "up": ("up", "wup"),
    "down": ("down", "wdown"),
    "o": ("o", "out", "wo"),
}
FUSED = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "qk": ("q", "k"), "gate_up": ("gate", "up"), "gu": ("gate", "up")}


def role_of(name: str) -> str:
    """Return what a projection is by the words of its name: q, k, v, o, gate, up, down; empty where none tells."""
    for text in reversed(re.split(r"[/.]", name)):
        words = [w for w in re.split(r"[^A-Za-z]+|\d+", text) if w]
        roles = {r for r, known in ROLES.items() if any(w.lower() in known for w in words)}
        if len(roles) == 1:
            return roles.pop()
    return ""
