"""Where the records of a good and a bad state part first, and what their compiled programs do otherwise there."""

from pathlib import Path
from tempfile import TemporaryDirectory

from precaudit.diagnosis.bisection.compiled import first_parted, hlo_rows
from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.passes import TEXT, dumped_files
from precaudit.diagnosis.bisection.processes import ProcessTrials
from precaudit.diagnosis.bisection.records import HloRow, Parted


def part_states(
    trials: ProcessTrials, runs: tuple[Path, Path], states: tuple[Changes, Changes]
) -> tuple[Parted | None, tuple[HloRow, ...]]:
    """Return where two states part, good and bad, and how their compiled programs differ there.

    Both compile once more for that. Raises UserError where one does not.
    """
    parted = first_parted(*runs)
    if parted is None:
        return None, ()
    return parted, hlo_rows(_texts(trials, states[0]), _texts(trials, states[1]), parted.source)


def _texts(trials: ProcessTrials, changes: Changes) -> list[str]:
    """Return the texts of the modules that a state compiles, as XLA optimised them."""
    with TemporaryDirectory(prefix="precaudit-") as made, trials.sides.site(changes) as site:
        into = Path(made).resolve()
        asked = ["trace", trials.subject, *trials.arguments, "-o", str(into / "run"), "--force"]
        files = dumped_files(site, asked, "", into / "dump")
        return [f.read_text(errors="replace") for f in files if f.name.endswith(TEXT)]
