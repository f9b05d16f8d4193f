"""Which tokens end a model's generation, as its files say."""

from collections.abc import Iterable
from typing import Any

from precaudit.errors import UserError
from precaudit.models.checkpoints.gguf_files import GgufFile
from precaudit.models.checkpoints.opening import Checkpoint, json_table

GGUF_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # llama.cpp's end of generation


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids, in their order, that end a sequence; none where the files name none.

    A folder's ``generation_config.json`` counts before its ``config.json``, as in transformers. Raises UserError for
    what is no token id, or one outside the vocabulary.
    """
    path = checkpoint.path
    if path.is_file():
        metadata = GgufFile.open(path).metadata
        return check_token_ids(
            [metadata[key] for key in GGUF_KEYS if key in metadata], checkpoint.config.vocab, str(path)
        )
    for name in ("generation_config.json", "config.json"):
        given = json_table(path / name, "").get("eos_token_id") if (path / name).is_file() else None
        if given is not None:
            return check_token_ids(
                given if isinstance(given, list) else [given], checkpoint.config.vocab, str(path / name)
            )
    return ()


def check_token_ids(ids: Iterable[Any], vocab: int, where: str) -> tuple[int, ...]:
    """Return token ids, each once; raises UserError for one that is none, or outside the vocabulary."""
    found = []
    for i in ids:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise UserError(f"{where}: end token {str(i)[:40]!r} is no token id")
        if not 0 <= int(i) < vocab:
            raise UserError(
                f"{where}: end token {int(i)} is outside the vocabulary of {vocab}; give the right ones with "
                "--end-tokens, or none"
            )
        found.append(int(i))
    return tuple(dict.fromkeys(found))
