"""Sums over several devices that one of two programs makes in parts, and the other does not, or otherwise (JAX)."""

from collections.abc import Iterator, Sequence

from precaudit.diagnosis.sameness.observed import Observed
from precaudit.diagnosis.sameness.records import ProgramSum
from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.products import label_of
from precaudit.interpreters.jaxpr.raised import users_line
from precaudit.references.comparison.exact import tapped_jaxpr


def sums_of_one(programs: tuple[str, str], seen: Sequence[Observed]) -> tuple[ProgramSum, ...]:
    """Return the sums in parts of each program, without those that both make alike on one line."""
    each = [list(_sums(name, x)) for name, x in zip(programs, seen, strict=True)]
    alike = [{(s.source, s.split) for s in sums} for sums in each]
    return tuple(s for i, sums in enumerate(each) for s in sums if (s.source, s.split) not in alike[1 - i])


def _sums(program: str, x: Observed) -> Iterator[ProgramSum]:
    found = {label: split for n in x.of.opened.record.neutrality for label, split in n.split.items()}
    for equation in walk_equations(tapped_jaxpr(x.of).jaxpr) if found else ():
        if (split := found.pop(label_of(equation), None)) is not None:
            line, made = users_line(equation), equation.outvars[0].aval.dtype.name
            yield ProgramSum(program=program, source="" if line is None else line.source, format=made, split=split)
