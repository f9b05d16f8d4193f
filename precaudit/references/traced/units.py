"""How a TPU or a GPU makes the products of a program's run, as its compiled program says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.jaxpr.multiplying import OPEN_ON_GPU, PASSES, is_compilers_choice, on_gpu
from precaudit.interpreters.jaxpr.products import GROUPED, find_products, labels
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.recording.runs.programs import ProgramRun
from precaudit.schema.records.devices import FROM_JAXPR, SplitSum, Way, device_kind


@dataclass(frozen=True)
class Units:
    """The one way in which each product is made, by its label; None: the matrix unit makes all, as they declare.

    Products that are made in several ways are left out. ``vector``: whether a TPU's vector unit makes any. ``gpu``:
    whether a GPU makes them; ``cpu``: whether a CPU does, as they declare. ``split``: those in parts of several
    devices.
    """

    made: Mapping[str, Way] | None
    vector: bool
    gpu: bool = False
    cpu: bool = False
    split: Mapping[str, SplitSum] = field(default_factory=dict)

    def making(self, how: Realisation) -> Realisation:
        """Return a realisation with products made so."""
        how = replace(how, split=self.split) if self.split else how
        if self.cpu:
            return how
        if self.gpu:
            return replace(how, unit="gpu", made=self.made)
        return replace(how, unit="matrix") if self.made is None else replace(how, made=self.made)

    def otherwise(self, jaxpr: jex.Jaxpr) -> tuple[Way, ...]:
        """Return the ways that a GPU may have for products of an open jaxpr that are left open; () where none is."""
        if not self.gpu:
            return ()
        grouped = (e for e in walk_equations(jaxpr) if e.primitive.name == GROUPED)
        said = [*self._ways(jaxpr), *((e, (self.made or {}).get("")) for e in grouped)]
        return OPEN_ON_GPU if any(on_gpu(*known) is None for known in said) else ()

    def leaves_open(self, jaxpr: jex.Jaxpr) -> bool:
        """Whether it is not known of some product of an open jaxpr how it is made, where that changes its precision.

        Of a GPU every way is tried.
        """
        if self.made is None or self.gpu or self.cpu:
            return False
        return any(is_compilers_choice(e) and said not in PASSES for e, said in self._ways(jaxpr))

    def _ways(self, jaxpr: jex.Jaxpr) -> Iterator[tuple[Any, Way | None]]:
        made = self.made or {}
        names = labels(jaxpr) if made.keys() - {""} else {}
        return ((e, made.get(names.get(id(e), ""))) for e in find_products(jaxpr))


def flushes_of(run: ProgramRun) -> bool:
    """Whether a run's device made 0 of subnormals; of a run that does not say, whether devices of its kind do."""
    return device_kind(run.device) in ("cpu", "tpu") if run.flushes is None else run.flushes


def units_of(run: ProgramRun) -> Units:
    """Return how the products of a run were made."""
    kind = device_kind(run.device)
    splits = [n.split for n in run.neutrality]
    split = splits[0] if splits and all(x == splits[0] for x in splits) else {}
    if kind not in ("tpu", "gpu"):
        return Units(None, False, cpu=True, split=split)
    if run.device.endswith(FROM_JAXPR):
        return Units(None, False)
    read = [n.made for n in run.neutrality]
    first = read[0] if read and all(made == read[0] for made in read) else {}
    single = {label: ways[0] for label, ways in first.items() if len(ways) == 1}
    if kind == "gpu":
        return Units(single, False, True, split=split)
    vector = any(n.predicted is None or n.predicted.captured.vector for n in run.neutrality)
    return Units(single, vector, split=split)
