"""How a run's compiled programs make the products of its points, as run.json has it."""

from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.lengths import bucket
from precaudit.schema.records.devices import Way
from precaudit.schema.records.runs import Neutrality, RunRecord


def ways_of(recorded: Recorded, prompt: str, phase: str, point: str) -> frozenset[Way]:
    """Return the ways in which the programs that ran a prompt's phase make a point's products; none where not known.

    Programs of the shape of the prompt's batch; where none was read, those of the phase. Several, such as of decode
    steps that record more than others, are all looked at: one that does not name the point leaves it unknown.
    """
    read = [n.made for n in _programs(recorded, prompt, phase)]
    if not read or not all(point in made for made in read):
        return frozenset()
    return frozenset(way for made in read for way in made[point])


def _programs(recorded: Recorded, prompt: str, phase: str) -> list[Neutrality]:
    """Return what is noted of a phase's programs of the shape that a prompt ran in; of all shapes where none has it.

    A short sequence may share the program of the next longer ones.
    """
    noted = [n for n in recorded.run.record.neutrality if n.phase == phase]
    shape = _shape(recorded.run.record, {p: len(x.tokens) for p, x in recorded.run.prompts.items()}, prompt)
    fitting = [n.shape for n in noted if shape and n.shape[:1] == shape[:1] and n.shape >= shape]
    return [n for n in noted if fitting and n.shape == min(fitting)] or noted


def _shape(record: RunRecord, tokens: dict[str, int], prompt: str) -> tuple[int, ...]:
    """Return the least shape [B, T] of a prompt's batch (``Neutrality``); () where some of it was not recorded."""
    asked = record.requested
    if prompt not in asked.prompts:
        return ()
    first = asked.prompts.index(prompt) // asked.batch * asked.batch
    batch = asked.prompts[first : first + asked.batch]
    if not set(batch) <= tokens.keys():
        return ()
    steps = 0 if asked.phases == ("prefill",) else asked.decode_steps
    return len(batch), bucket(max(tokens[p] for p in batch) + steps)
