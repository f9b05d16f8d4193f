"""How a TPU makes the products of a program's run, as its compiled program says."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from precaudit.records import FROM_JAXPR, Way, device_kind
from precaudit.runs.programs import ProgramRun
from precaudit.transforms.emulate import PASSES, Realisation, chosen
from precaudit.transforms.products import labels, products


@dataclass(frozen=True)
class Units:
    """The one way in which each product is made, by its label; None: the matrix unit makes all, as they declare.

    Products that are made in several ways are left out. ``vector``: whether the vector unit makes any.
    """

    made: Mapping[str, Way] | None
    vector: bool

    def making(self, how: Realisation) -> Realisation:
        """Return a realisation with products made so."""
        return replace(how, unit="matrix") if self.made is None else replace(how, made=self.made)

    def leaves_open(self, jaxpr: Any) -> bool:
        """Whether it is not known of some product of an open jaxpr how it is made, where that changes its precision."""
        if self.made is None:
            return False
        names = labels(jaxpr) if self.made.keys() - {""} else {}
        return any(chosen(e) and self.made.get(names.get(id(e), "")) not in PASSES for e in products(jaxpr))


def units_of(run: ProgramRun) -> Units | None:
    """Return how the products of a run were made; None of a device that is no TPU."""
    if device_kind(run.device) != "tpu":
        return None
    if run.device.endswith(FROM_JAXPR):
        return Units(None, False)
    read = [n.made for n in run.neutrality]
    first = read[0] if read and all(made == read[0] for made in read) else {}
    single = {label: ways[0] for label, ways in first.items() if len(ways) == 1}
    vector = any(n.predicted is None or n.predicted.captured.vector for n in run.neutrality)
    return Units(single, vector)
