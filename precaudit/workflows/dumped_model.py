"""A dump of another framework, and the model that it is of."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.errors import UserError
from precaudit.progress import Advance, silent
from precaudit.recording.runs.reader import Run, open_run

if TYPE_CHECKING:
    from precaudit.schema.policies import Policy


def dump_as_run(
    folder: Path | str, model: str | None, policy: "Policy | str | None" = None, tell: Advance = silent
) -> Run:
    """Return a dump as a run of a model, which compare judges; ``model``: where its weights lie.

    ``policy``: what the other framework computes in, None: as the formats of its numbers say. Without a model it is of
    the one that was given before. Raises UserError where none was, or where the dump cannot be of this model.
    """
    from precaudit.models.checkpoints import open_checkpoint
    from precaudit.recording.dumps.of_model import write_as_run
    from precaudit.recording.dumps.runs import open_imported
    from precaudit.schema.policies import check_settings, load_policy

    if model is None:
        if policy is not None:
            raise UserError("--policy says what made a dump, and is taken together with --model PATH")
        return open_run(folder)
    dump = open_imported(folder)
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    if chosen is not None:
        check_settings(chosen)
    checkpoint = open_checkpoint(model)
    factor = "published" if chosen is None else chosen.embed_factor
    made = checkpoint.with_factor(factor)
    if chosen is not None and not checkpoint.rounds_factor:
        chosen = replace(chosen, embed_factor="exact")
    return write_as_run(dump, made, model, chosen, tell)


def opened_dump(folder: Path | str, keywords: dict[str, Any]) -> Run:
    """Return a dump as a run of the model that keywords name; ``policy`` is taken from them."""
    return dump_as_run(folder, keywords.get("model"), keywords.pop("policy", None))
