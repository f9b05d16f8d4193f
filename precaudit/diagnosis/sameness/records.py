"""What ``same`` finds of two programs, a record a case."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from precaudit.schema.brief import Brief
from precaudit.schema.records.base import Count, Index, Number, Record
from precaudit.schema.records.devices import SplitSum

Answer = Literal["same", "other", "unknown"]


class RowsBeside(Record, frozen=True, omit_defaults=False):
    """An output of both programs: rows of each, from ``first`` on, against those of the other.

    ``apart``: the largest relative distance of a row in FP64, of the rows ``where`` they are apart. ``rounding``: of
    each program the relative distance of these rows as they ran from FP64; ``top1``: in how many of them the largest
    logit is FP64's.
    """

    output: str
    rows: Count
    first: tuple[Index, Index]
    apart: Number
    where: tuple[Index, ...]
    rounding: tuple[Number, Number]
    top1: tuple[Count, Count] | None = None


class Parting(Record, frozen=True, omit_defaults=False):
    """Where the FP64 values of a program first are none of the other's: a point in a call, and a step of its scans.

    ``point``: empty where every point's values are the other's and its outputs are not. ``at``: the first vector of it
    that the other has not, as an index, where the other has rows of all of its. ``made_of``: points that it reads and
    whose values are the other's; ``layers``: all that make it otherwise where they read the other's values, empty where
    that is not known; ``before``: the last point before it whose values are the other's, and where.
    """

    program: str
    point: str
    source: str
    call: Index
    step: tuple[Index, ...]
    at: str
    made_of: tuple[str, ...]
    layers: tuple[Index, ...]
    before: str


class TensorHeld(Record, frozen=True, omit_defaults=False):
    """A tensor of a dump, and the value of a program that it is, or is nearest to; none where no value has its size.

    ``axes``: the pattern that makes one of the other; ``off``: relative distance from FP64; ``equal``: whether that is
    what the tensor's format, and sums in it, may make; ``finite``: whether it holds no NaN.
    """

    tensor: str
    shape: tuple[Count, ...]
    dtype: str
    value: str = ""
    source: str = ""
    axes: str = ""
    off: Number | None = None
    equal: bool = False
    finite: bool = True


class ProgramSum(Record, frozen=True, omit_defaults=False):
    """A product of a program that several devices make in parts, where the other has none such: how these add.

    ``format``: that of the product, to which each part is rounded.
    """

    program: str
    source: str
    format: str
    split: SplitSum


class MeshCause(Record, frozen=True, omit_defaults=False):
    """A mistake on a mesh at a line of a program, and what is wrong there.

    Undone in FP64, with a case's other ones, it makes all outputs the other program's.
    """

    program: str
    name: str
    source: str
    says: str


class Sameness(Record, frozen=True, omit_defaults=False):
    """Whether two programs are one formula, in a case: the answer, why, every output, and where they part.

    ``lines``: of each program the point whose own rounding changes its output most, where they are one formula;
    ``sums``: those over devices that one of both makes so. ``tensors``: those of a dump, where one of the two is that.
    ``causes``: mistakes on a mesh that make them two.
    """

    programs: tuple[str, str]
    case: str
    answer: Answer
    says: str
    outputs: tuple[RowsBeside, ...] = ()
    partings: tuple[Parting, ...] = ()
    lines: tuple[str, ...] = ()
    tensors: tuple[TensorHeld, ...] = ()
    sums: tuple[ProgramSum, ...] = ()
    causes: tuple[MeshCause, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 of one formula, 1 of two, 3 where it is not known."""
        return {"same": 0, "other": 1}.get(self.answer, 3)


@dataclass(frozen=True, repr=False)
class SameFormula(Brief):
    """What ``same`` found: a record of every case; ``exit_code`` is the worst of theirs."""

    cases: tuple[Sameness, ...]

    @property
    def exit_code(self) -> int:
        """0 where all cases are one formula, 1 where one is not, else 3."""
        codes = {c.exit_code for c in self.cases}
        return 1 if 1 in codes else max(codes)


def step_text(step: Sequence[int]) -> str:
    """Return which step of its scans a value is made in: of one scan, a layer."""
    return f" of {'layer' if len(step) == 1 else 'step'} {','.join(map(str, step))}" if step else ""
