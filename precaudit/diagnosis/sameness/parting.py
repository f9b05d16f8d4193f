"""Where two programs that are not one formula part first, by the FP64 values of their points alone."""

from collections import defaultdict
from collections.abc import Sequence

from precaudit.diagnosis.sameness.layers import layers_apart
from precaudit.diagnosis.sameness.observed import Observed, Site
from precaudit.diagnosis.sameness.others import Others
from precaudit.diagnosis.sameness.records import Parting, step_text


def first_parting(program: str, one: Observed, other: Observed, covered: float, calls: Sequence[int]) -> Parting:
    """Return where a program's values first leave the other's.

    ``program``: what it is called. ``covered``: the share of its outputs' rows that the other has rows of; ``calls``:
    those whose outputs are apart. What is written another way, and then comes to the other's values again, is no
    parting: where a point is not among the other's values, something that reads it must not be, down to an output.
    """
    others = Others(other, covered)
    sites = one.sites()
    flow = _Flow(one, {s for s in sites if others.has(one.value(s))})
    otherwise = flow.written_otherwise(sites)
    for call in calls:
        its = [s for s in sites if s.call == call]
        bad = flow.leading_to_outputs(its)
        first = next((s for s in its if s in bad and flow.name(s) not in otherwise), None)
        first = first or next((s for s in its if s in bad), None)
        if first is not None:
            before = [s for s in its if s.order < first.order and s in flow.same]
            made_of = dict.fromkeys(one.tap(s) for s in before if one.tap(s) in one.reads(first))
            return Parting(
                program=program,
                point=first.point.name,
                source=first.point.source,
                call=call,
                step=first.step,
                at=others.first_missing(one.value(first)) if covered == 1 else "",
                made_of=tuple(made_of),
                layers=layers_apart(first, one, others, flow.same),
                before=_last(before),
            )
    before = [s for s in sites if s.call == calls[0] and s in flow.same]
    return Parting(
        program=program,
        point="",
        source="",
        call=calls[0],
        step=(),
        at="",
        made_of=(),
        layers=(),
        before=_last(before),
    )


def _last(sites: Sequence[Site]) -> str:
    return sites[-1].point.name + step_text(sites[-1].step) if sites else ""


class _Flow:
    """What reads what among a program's points, and at which of its sites values are the other's."""

    def __init__(self, of: Observed, same: set[Site]) -> None:
        self.name, self.outputs, self.same = of.tap, of.graph[1], same
        self.readers: dict[str, set[str]] = defaultdict(set)
        for reader, names in of.graph[0].items():
            for name in names:
                self.readers[name].add(reader)

    def next_readers(self, its: Sequence[Site]) -> dict[Site, list[Site]]:
        """Return, of every site of a call, where each of its readers is made next."""
        following: dict[str, Site] = {}
        found = {}
        for s in reversed(its):
            found[s] = [following[r] for r in self.readers.get(self.name(s), ()) if r in following]
            following[self.name(s)] = s
        return found

    def leading_to_outputs(self, its: Sequence[Site]) -> set[Site]:
        """Return the sites of a call that are not the other's, and from which such sites lead to an output."""
        following = self.next_readers(its)
        bad: set[Site] = set()
        for s in reversed(its):
            ends = self.name(s) in self.outputs and not following[s]
            if s not in self.same and (ends or any(r in bad for r in following[s])):
                bad.add(s)
        return bad

    def written_otherwise(self, sites: Sequence[Site]) -> set[str]:
        """Return points that somewhere are not among the other's values though all that reads them is."""
        found = set()
        for call in dict.fromkeys(s.call for s in sites):
            its = [s for s in sites if s.call == call]
            for s, following in self.next_readers(its).items():
                if s not in self.same and following and all(r in self.same for r in following):
                    found.add(self.name(s))
        return found
