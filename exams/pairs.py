"""Two mistakes at once in one layer: both must be named, the second though its inputs come from the first."""

from dataclasses import dataclass

from exams.mistakes import MISTAKES, Mistake
from precaudit.models.jax_decoder import Parts
from precaudit.recording.tracing.subject import Subject, load

NAMED = {m.name: m for m in MISTAKES}
PAIRS = (
    ("RoPE off by three", "values × 1.1 inside"),
    ("RoPE off by three", "head 3 is zero"),
    ("RoPE off by three", "quick gelu"),
    ("RoPE tables in bf16", "values × 1.1 inside"),
    ("scale × 0.98", "head 3 is zero"),
    ("scale × 0.98", "activation clipped"),
    ("scale 1/√(d+1)", "values × 1.1 inside"),
    ("scale 1/√(d+1)", "mask one ahead"),
    ("heads interleaved", "quick gelu"),
    ("heads interleaved", "first token's value dropped"),
    ("mean of sizes", "values × 1.1 inside"),
    ("mean of sizes", "scale × 0.98"),
    ("norm without weight", "RoPE off by three"),
    ("norm without weight", "values × 1.1 inside"),
    ("one channel × 1.5", "a token's MLP is zero"),
    ("one channel × 1.5", "exp by Schraudolph"),
    ("mean over D − 1", "quick gelu"),
    ("mask one short", "activation clipped"),
    ("columns scaled", "first token's value dropped"),
    ("a token's MLP is zero", "quick gelu"),
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two mistakes in different parts of the decoder."""

    first: Mistake
    second: Mistake

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.first.name} + {self.second.name}"

    def subject(self, layer: int | None) -> Subject:
        """Return tiny with both mistakes in one layer or in all (None)."""
        parts = self.second.parts(layer, self.first.parts(layer, Parts()))
        return load("tiny", self.first.policy, None, "cpu", parts)

    def wanted(self) -> set[tuple[str, str, str]]:
        """Return (point, class, cause) of both."""
        return {(m.point, m.kind, m.cause or "none reproduces it") for m in (self.first, self.second)}


def pairs() -> list[Pair]:
    """Return the pairs of the exam: of one policy, in different parts."""
    found = [Pair(NAMED[a], NAMED[b]) for a, b in PAIRS]
    assert all(p.first.part != p.second.part and p.first.policy == p.second.policy for p in found)
    return found
