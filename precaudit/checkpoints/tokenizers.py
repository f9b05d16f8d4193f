"""Tokenizers and chat templates through transformers, which only this file imports."""

import os
from pathlib import Path
from typing import Any

from precaudit.errors import UserError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it tells, on import, that it found no torch

# GGUF names the pre-tokenizer, not its rules.
GGUF_PRETOKENIZERS = ("smollm", "qwen2", "gpt-2")
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WITHOUT = 'prompts of token ids need none: --prompts FILE with lines {"id": "a", "tokens": [1, 2, 3]}'
CONTROL_TOKEN, USER_TOKEN = 3, 4


def from_folder(folder: Path) -> Any:
    """Return the transformers tokenizer of a snapshot folder; nothing is fetched and no code in it is run.

    tokenizer.json says all there is; where it lacks, transformers builds one of other files, and imports torch for it.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if (folder / "tokenizer.json").is_file():
            if not (folder / "tokenizer_config.json").is_file():
                return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds for a broken file
        text = str(error).strip().splitlines()
        detail = text[0] if text else type(error).__name__
        raise UserError(f"{folder}: the tokenizer files cannot be read ({detail}); {WITHOUT}") from None


def from_gguf(metadata: dict[str, Any], where: str) -> Any:
    """Return a transformers tokenizer of GGUF metadata: byte-level BPE here, other kinds by transformers' converter."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or kind not in GGUF_PRETOKENIZERS:
        return _converted(metadata, where)
    try:
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        kinds = metadata.get("tokenizer.ggml.token_type", [])
        vocabulary = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(m.split(" ", 1)) for m in merges]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:
        raise UserError(f"{where}: broken tokenizer metadata ({type(error).__name__}: {error}); {WITHOUT}") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "qwen2")
    splits: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")],
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits.get(kind, []), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, k in zip(tokens, kinds, strict=False) if k == CONTROL_TOKEN]
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == USER_TOKEN]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = metadata.get("tokenizer.chat_template")
    return fast


def _converted(metadata: dict[str, Any], where: str) -> Any:
    """Return the tokenizer transformers makes of GGUF metadata (SentencePiece, other pre-tokenizers).

    Its own reader of the file needs torch; its conversion does not.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    except ImportError:
        raise UserError(
            f"{where}: this tokenizer needs a newer transformers: pip install -U transformers, or {WITHOUT}"
        ) from None
    from transformers import PreTrainedTokenizerFast

    try:
        table, settings = (
            {ours: metadata[f"tokenizer.{key}"] for key, ours in names.items() if f"tokenizer.{key}" in metadata}
            for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
        )
        for name in ("bos", "eos", "unknown", "padding"):
            at = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if at is not None:
                settings[f"{name[:3]}_token"] = table["tokens"][at]
        if table.get("tokenizer_type") == "llama":  # llama.cpp's default where a file says nothing
            settings.setdefault("add_bos_token", True)
        backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), table)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except Exception as error:  # the library raises many kinds for broken metadata
        raise UserError(f"{where}: the tokenizer cannot be read ({type(error).__name__}: {error}); {WITHOUT}") from None
