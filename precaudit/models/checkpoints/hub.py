"""Hub ids such as ``HuggingFaceTB/SmolLM2-135M``: the cached snapshot, fetched where it is not there."""

import json
import re
from pathlib import Path

from precaudit.errors import UserError

HUB_ID = re.compile(r"^[\w][\w.-]*/[\w][\w.-]*(@[\w.\-]+)?$")
FILES = (
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)
SPARE = ["consolidated*", "original/*"]  # the same weights once more


def is_hub_id(name: str) -> bool:
    """Whether a name reads as ``owner/model`` or ``owner/model@revision``."""
    return bool(HUB_ID.match(name))


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a hub id's snapshot where it is cached whole; the network is not asked.

    Raises UserError for a name the hub cannot hold.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        found = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise UserError(f"{name}: {error}") from None
    return found if _whole(found) else None


def snapshot(name: str) -> Path:
    """Return the folder of a hub id's snapshot; the network is asked only for what is not cached.

    Weights are fetched as safetensors alone: pickles are never opened. Raises UserError where it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    if (found := cached_snapshot(name)) is not None:
        return found
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=SPARE)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: no such file or folder, not in the hub's cache, and it could not be fetched ({text}); "
            "give a folder, or fetch it where there is a network: hf download " + repository
        ) from None


def _whole(folder: Path) -> bool:
    """Whether a snapshot holds a configuration and all its weights; other tools cache a tokenizer alone."""
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file():
        return False
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # opening it says what is wrong
    return all((folder / str(name)).is_file() for name in names)
