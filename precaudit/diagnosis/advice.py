"""What to record next, by what the run already has."""

from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.graphs.decoder import present
from precaudit.schema.records.runs import Requested


def record_more(recorded: Recorded) -> str:
    """Return the options under which trace records what this run lacks."""
    config = recorded.run.record.model.config
    return widening_options(recorded.requested, config["layers"], recorded.config.sparse)


def widening_options(requested: Requested, layers: int, sparse: bool) -> str:
    """Return the options that widen what was requested; that there are none where all was."""
    found = []
    if not set(present(sparse)) <= {*requested.points, *requested.support}:
        found.append("--points all")
    if len(requested.layers) < layers:
        found.append("--layers :")
    if requested.positions is not None:
        found.append("no --positions")
    if not {"prefill", "decode"} <= set(requested.phases):
        found.append("--phases prefill,decode")
    return f"record more with {', '.join(found)}" if found else "every point of every layer was recorded already"
