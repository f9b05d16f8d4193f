"""Hub ids such as ``HuggingFaceTB/SmolLM2-135M``: the cached snapshot, fetched where it is not there."""

import re
from pathlib import Path

from precaudit.errors import UserError

HUB_ID = re.compile(r"^[\w][\w.-]*/[\w][\w.-]*(@[\w.\-]+)?$")
FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json",
         "chat_template*", "vocab.json", "merges.txt")  # fmt: skip


def is_hub_id(name: str) -> bool:
    """Whether a name reads as ``owner/model`` or ``owner/model@revision``."""
    return bool(HUB_ID.match(name))


def snapshot(name: str) -> Path:
    """Return the folder of a hub id's snapshot; the network is asked only for what is not cached.

    Weights are fetched as safetensors alone: pickles are never opened. Raises UserError where it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise UserError(f"{name}: {error}") from None
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: no such file or folder, not in the hub's cache, and it could not be fetched ({text}); "
            "give a folder, or fetch it where there is a network: hf download " + repository
        ) from None
