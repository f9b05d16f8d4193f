"""Accum records of a program's run: what sums of its products in another format would make of recorded inputs (JAX)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from precaudit.interpreters.jaxpr.accumulating import emulate_accumulation
from precaudit.interpreters.jaxpr.reads import multiplied_taps
from precaudit.interpreters.jaxpr.shadow import trace_jaxpr
from precaudit.numbers.arrays import Array
from precaudit.references.traced.judged import At, JudgedCall
from precaudit.references.traced.remade import Tapped
from precaudit.references.traced.unrounded import Place
from precaudit.schema.emulations import Emulation
from precaudit.schema.metrics.sizes import error_sizes
from precaudit.schema.places import Place as Where
from precaudit.schema.records.errors import AccumulationError


class Accumulations:
    """A program's segments with their products summed in each of some formats, compiled when first asked for.

    Of a small program all of them are one compiled program; of a large one each point's is one.
    """

    def __init__(self, tapped: Tapped, formats: Sequence[str]) -> None:
        self.tapped, self.formats = tapped, tuple(formats)
        self.compiled: dict[frozenset[str], Any] = {}
        self.multiplied: frozenset[str] | None = None

    def records(
        self,
        call: JudgedCall,
        every: Sequence[At],
        taps: dict[str, Array],
        args: tuple[Any, ...],
        cut: Callable[[Place, Array], Array],
    ) -> list[AccumulationError]:
        """Return a record of every place whose segment holds a matrix product, and format. Under x64."""
        if not self.formats:
            return []
        if self.multiplied is None:
            self.multiplied = multiplied_taps(trace_jaxpr(self.tapped.call, args, {})[0].jaxpr)
        names = {p.name for p, _ in every if self.tapped.names.get(p.name) in self.multiplied}
        found: list[AccumulationError] = []
        for some in [frozenset(names)] if self.tapped.small else [frozenset((name,)) for name in sorted(names)]:
            made = {name: [np.asarray(x) for x in each] for name, each in self._evaluate(some, taps, args).items()}
            for p, layer in every:
                if p.name in made:
                    exact, *sums = (cut((p.name, layer), x) for x in made[p.name])
                    here = Where(call.case, call.opened.record.phase, call.number, layer, p.name)
                    found += [
                        here.record(
                            AccumulationError, Emulation(accumulation=text).name, "fp64", **error_sizes(x, exact)
                        )
                        for text, x in zip(self.formats, sums, strict=True)
                    ]
        return found

    def _evaluate(
        self, names: frozenset[str], taps: dict[str, Array], args: tuple[Any, ...]
    ) -> dict[str, tuple[Any, ...]]:
        if not names:
            return {}
        if names not in self.compiled:
            function = emulate_accumulation(self.tapped.call, self.formats, names, self.tapped.steps)
            self.compiled[names] = jax.jit(function, compiler_options=self.tapped.options)
        made: dict[str, tuple[Any, ...]] = self.compiled[names](taps, *args)
        return made
