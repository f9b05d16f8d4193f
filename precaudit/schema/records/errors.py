"""The lines of errors.jsonl, and of probe.jsonl, which are errors too."""

from typing import Literal

from precaudit.schema.records.base import Count, Index, Number, Record


class Worst(Record, frozen=True, omit_defaults=False):
    """The element with the largest absolute error, with its index and both values."""

    index: tuple[Index, ...]
    candidate: Number
    reference: Number


class Signed(Record, frozen=True, omit_defaults=False):
    """A signed statistic and the noise honest programs have in it (schema/metrics/residue.py)."""

    value: Number
    noise: Number


class Unexplained(Record, frozen=True, omit_defaults=False):
    """What the best honest emulation leaves: ‖c − ê‖ / ‖r‖, the same in unit roundoffs of the output's format.

    ``excess``: ‖c − ê‖ over what honest programs leave; ``gain``, ``mean``: signed ⟨c − ê, r⟩ / ⟨r, r⟩ and mean of
    c − ê; ``componentwise``: the largest ``|c − r|`` over its componentwise bound, with the element's index.
    """

    rel_l2: Number
    u: Number
    excess: Number | None = None
    gain: Signed | None = None
    mean: Signed | None = None
    componentwise: tuple[Number, tuple[Index, ...]] | None = None


class Distribution(Record, frozen=True, omit_defaults=False):
    """Next-token distributions, one value a position: ``kl`` = KL(reference ‖ candidate) in nats.

    ``kl_noise``: its mean over emulated-rounding runs; ``top1`` … ``top50``: the shared part of the k most likely;
    ``rank``: of the reference's top-1 in the candidate, 0 the first; ``logprob_error``: of the token chosen next, the
    candidate's own top-1; ``gap``: top-1 minus top-2 logit of the reference; ``tv``: total variation distance, which
    runs before it was measured lack.
    """

    positions: tuple[Index, ...]
    kl: tuple[Number, ...]
    kl_noise: tuple[Number, ...] | None
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    top50: tuple[float, ...]
    rank: tuple[Index, ...]
    logprob_error: tuple[Number, ...]
    gap: tuple[Number, ...]
    tv: tuple[Number, ...] = ()


Scope = dict[str, tuple[Number, int]]


class Narrow(Record, frozen=True, omit_defaults=False):
    """A narrow format inside an operation that makes its values, where the textbook with float32 inside does not.

    ``error``: ‖c − r‖ / ‖r‖ from FP64 of the textbook's operation on the recorded inputs; ``wide``: the same of what
    float32 inside would make of them. ``says``: what is rounded, in words.
    """

    cause: str
    says: str
    error: Number
    wide: Number


class ErrorRecord(Record, frozen=True):
    """A line of errors.jsonl; ``unknown`` says why there are no numbers.

    Scopes hold the worst value of each metric with its index: a token's position, a head, a channel (head · K + k);
    ``excess``, ``gain`` and ``mean`` there are in units of their noise. ``excluded``: masked elements, which are in no
    number. ``elided``: what the best emulation does otherwise: places left unrounded, a point read as it was before it
    was rounded, another honest form. ``inherits``: a recorded point between inputs and result from which it closes; of
    sums, the first operation that was made again.
    ``costly``: the place whose rounding an ill-conditioned operation amplifies to most of its error. ``summed``: the
    format of 16 bits in which the backend summed a product, by which the record closes and no program asks for it.
    ``narrow``: the format inside that a program declares and its textbook does not have.
    ``unsteady``: draws that are left out of noise, many times as far off as the emulation: in them a comparison or the
    like turned, no rounding. ``lost``: how many whole numbers of positions, counts or indices the run holds as others;
    ``lost_between``: the least and the largest of these; ``collisions``: how many of all it does not tell apart.
    ``slices``: how many tokens, heads and channels the worst was chosen from. ``missing``: requested and not in the
    run. ``skipped``: in a branch that was not taken. ``origin``: the operation that makes what is not finite, in words.
    ``gain``: ⟨e, r⟩ / ⟨r, r⟩; ``mean``: of e, signed.
    ``mismatched``: elements of a cache, or of a stream that was handed on, whose bits differ from the rows written; at
    steps where caches are hashed (``dtype`` uint32, ``n`` rows) the rows that differ; of a program's sort, top-k or
    argmax the choices that are not those of the recorded values. ``rows``: which rows, as [first, end).
    """

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
    kind: Literal["forward", "local", "state", "accum", "weights", "pair", "formula", "product", "sums", "policy"]
    candidate: str
    reference: str
    dtype: str | None = None
    n: Count = 0
    nonfinite: Count = 0
    mae: Number | None = None
    max_diff: Number | None = None
    rel_l2: Number | None = None
    cosine: Number | None = None
    max_ulp: Count | None = None
    bits_lost: Number | None = None
    snr: Number | None = None
    gain: Number | None = None
    mean: Number | None = None
    excluded: Count = 0
    worst: Worst | None = None
    explained: dict[str, Number] | None = None
    elided: dict[str, tuple[str, ...]] | None = None
    inherits: str | None = None
    costly: str | None = None
    summed: str | None = None
    narrow: Narrow | None = None
    lost: Count = 0
    lost_between: tuple[Number, Number] | None = None
    collisions: Count = 0
    unsteady: Count = 0
    unexplained: Unexplained | None = None
    ratio: Number | None = None
    scopes: dict[str, Scope] | None = None
    slices: dict[str, Count] | None = None
    mismatched: Count | None = None
    rows: tuple[tuple[Index, Index], ...] | None = None
    distribution: Distribution | None = None
    noise: Number | None = None
    missing: str | None = None
    unknown: str | None = None
    skipped: str | None = None
    origin: str | None = None

    @property
    def numberless(self) -> str | None:
        """Why there are no numbers: missing, unknown or skipped; None where there are."""
        if self.skipped is not None:
            return f"not run: {self.skipped}"
        return self.unknown if self.missing is None else f"missing: {self.missing}"


class ProbeRecord(ErrorRecord, frozen=True, kw_only=True):
    """A line of probe.jsonl: scores that a device made in one way, against FP64 of the operands as they are.

    ``prompt``: the shape, as ``--shape`` takes it; ``phase``: the format of the operands; ``point``: the way and, of
    what a TPU's compiler would make, `` on`` its name; ``unknown``: what the device said when it refused. ``asked``:
    the arithmetic that the way names; ``made``: what the scores were made of, more than one name where they cannot be
    told apart. ``version``: of JAX, or of libtpu. ``seconds`` of a call and ``time``, its ratio to a call of ``first``
    in the same round: lower quartile, median, upper quartile. ``memory``: bytes of arguments, outputs and temporaries.
    ``unit``, ``passes``: of a TPU.
    """

    kind: Literal["product"]
    way: str
    version: str
    asked: str | None = None
    made: tuple[str, ...] = ()
    honoured: Literal["yes", "replaced", "undecided"] | None = None
    first: str | None = None
    seconds: tuple[Number, Number, Number] | None = None
    time: tuple[Number, Number, Number] | None = None
    memory: tuple[Count, Count, Count] | None = None
    target: str | None = None
    unit: Literal["matrix", "vector"] | None = None
    passes: Index | None = None
