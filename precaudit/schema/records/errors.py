"""The lines of errors.jsonl: a record type for each kind of comparison, which its field ``kind`` tells apart."""

from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

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


Kind = Literal["forward", "local", "state", "accum", "weights", "pair", "formula", "product", "sums", "policy"]


class ErrorRecord(Record, frozen=True, kw_only=True, tag_field="kind"):
    """A line of errors.jsonl: two tensors at one place, and the sizes of ``candidate`` − ``reference`` there.

    The place: a prompt or case, a call of it (``phase`` and ``step``), a layer (None outside layers) and a point. Sizes
    are defined in schema/metrics/sizes.py; ``gain``: ⟨e, r⟩ / ⟨r, r⟩; ``mean``: of e, signed. Scopes hold the worst
    value of each metric with its index: a token's position, a head, a channel (head · K + k); ``excess``, ``gain`` and
    ``mean`` there are in units of their noise. ``excluded``: masked elements, which are in no number. ``missing``:
    requested and not in the run; ``unknown``: why there are no numbers; ``skipped``: in a branch that was not taken.
    """

    kind: ClassVar[Kind]

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
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
    scopes: dict[str, Scope] | None = None
    missing: str | None = None
    unknown: str | None = None
    skipped: str | None = None

    @property
    def numberless(self) -> str | None:
        """Why there are no numbers: missing, unknown or skipped; None where there are."""
        if self.skipped is not None:
            return f"not run: {self.skipped}"
        return self.unknown if self.missing is None else f"missing: {self.missing}"


class RatedError(ErrorRecord, frozen=True, kw_only=True):
    """An error beside what rounding makes: ``ratio`` of both.

    ``slices``: how many tokens, heads and channels the worst was chosen from.
    """

    ratio: Number | None = None
    slices: dict[str, Count] | None = None


class EmulatedError(RatedError, frozen=True, kw_only=True):
    """An error beside emulations of its rounding: ``explained``, the share of it that each makes.

    ``elided``: what the best emulation does otherwise: places left unrounded, a point read as it was before it was
    rounded, another honest form. ``inherits``: a recorded point between inputs and result from which it closes.
    ``costly``: the place whose rounding an ill-conditioned operation amplifies to most of its error. ``summed``: the
    format of 16 bits in which the backend summed a product, by which the record closes and no program asks for it.
    ``narrow``: the format inside that a program declares and its textbook does not have.
    ``unsteady``: draws that are left out of noise, many times as far off as the emulation: in them a comparison or the
    like turned, no rounding. ``lost``: how many whole numbers of positions, counts or indices the run holds as others;
    ``lost_between``: the least and the largest of these; ``collisions``: how many of all it does not tell apart.
    ``origin``: the operation that makes what is not finite, in words, or the overflow that finite values are made of.
    ``fp64_too``: whether FP64 makes as many values that are not finite there.
    """

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
    origin: str | None = None
    fp64_too: bool = False


class LocalError(EmulatedError, frozen=True, kw_only=True, tag="local"):
    """One operation alone: what was recorded, and FP64 of the operation on its recorded inputs."""

    kind: ClassVar[Kind] = "local"


class PolicyError(EmulatedError, frozen=True, kw_only=True, tag="policy"):
    """A local error of the reference implementation with the roundings that a policy announces; of caches, state."""

    kind: ClassVar[Kind] = "policy"

    mismatched: Count | None = None
    rows: tuple[tuple[Index, Index], ...] | None = None


class ForwardError(RatedError, frozen=True, kw_only=True, tag="forward"):
    """All operations up to here: what was recorded, and FP64 of the whole program.

    ``noise``: the error that emulated rounding makes, ‖noise‖ / ‖r‖; ``distribution``: of logits; ``narrow``: of an
    output, which has no local record, as an ``EmulatedError`` has it.
    """

    kind: ClassVar[Kind] = "forward"

    noise: Number | None = None
    narrow: Narrow | None = None
    distribution: Distribution | None = None


class SumError(RatedError, frozen=True, kw_only=True, tag="sums"):
    """Sums of rows beside those of their inputs; ``inherits``: the first operation that was made again."""

    kind: ClassVar[Kind] = "sums"

    inherits: str | None = None


class StateError(ErrorRecord, frozen=True, kw_only=True, tag="state"):
    """Bits that have to be the same.

    ``mismatched``: elements of a cache, or of a stream that was handed on, whose bits differ from the rows written; at
    steps where caches are hashed (``dtype`` uint32, ``n`` rows) the rows that differ; of a program's sort, top-k or
    argmax the choices that are not those of the recorded values. ``rows``: which rows, as [first, end).
    """

    kind: ClassVar[Kind] = "state"

    mismatched: Count | None = None
    rows: tuple[tuple[Index, Index], ...] | None = None


class FormulaError(ErrorRecord, frozen=True, kw_only=True, tag="formula"):
    """The program in FP64 beside its reference in FP64: no rounding is in it."""

    kind: ClassVar[Kind] = "formula"


class AccumulationError(ErrorRecord, frozen=True, kw_only=True, tag="accum"):
    """A product summed in another format, of recorded inputs; ``candidate``: which."""

    kind: ClassVar[Kind] = "accum"


class WeightError(ErrorRecord, frozen=True, kw_only=True, tag="weights"):
    """A weight as the program uses it beside the checkpoint's; ``point``: its name, of no prompt, phase or step."""

    kind: ClassVar[Kind] = "weights"


class PairError(ErrorRecord, frozen=True, kw_only=True, tag="pair"):
    """One run beside another, without FP64; ``distribution``: of logits."""

    kind: ClassVar[Kind] = "pair"

    distribution: Distribution | None = None


class ProductError(ErrorRecord, frozen=True, kw_only=True, tag="product"):
    """A product of one shape beside FP64, as budgets judge a ``ProbeRecord``; it is in no file."""

    kind: ClassVar[Kind] = "product"


E = TypeVar("E", bound=ErrorRecord)


def as_kind(e: Record, kind: type[E], **changes: Any) -> E:
    """Return a record as one of another kind, with the fields that both have."""
    return kind(**{name: getattr(e, name) for name in kind.__struct_fields__ if hasattr(e, name)} | changes)


# What a line may hold, as msgspec decodes it.
ERROR_KINDS = cast(
    "type[ErrorRecord]",
    LocalError
    | PolicyError
    | ForwardError
    | SumError
    | StateError
    | FormulaError
    | AccumulationError
    | WeightError
    | PairError,
)
KINDS: dict[str, type[ErrorRecord]] = {kind.kind: kind for kind in (*get_args(ERROR_KINDS), ProductError)}
