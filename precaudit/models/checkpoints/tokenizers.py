"""Tokenizers through the tokenizers library; chat templates, and what else a file may say, through transformers.

transformers is imported only here, and only where it is needed: that takes a second or more of every command.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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

# What tokenizer_config.json may say without changing what tokenizer.json makes of a text.
SILENT = frozenset(
    (
        "added_tokens_decoder",
        "additional_special_tokens",
        "chat_template",
        "clean_up_tokenization_spaces",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    )
)
NAMED = frozenset(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
LARGEST = 100_000  # above this transformers looks for a wrong pattern in files of Mistral's, and mends it


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer whose one file says all: texts by the tokenizers library, chats by transformers' of the same file."""

    backend: Any
    make: Callable[[], Any]

    @cached_property
    def _whole(self) -> Any:
        return self.make()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the tokens its template puts around one unless told otherwise."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def apply_chat_template(self, turns: Sequence[Mapping[str, str]], **options: Any) -> Any:
        """Return what the model's chat template makes of the turns, as transformers' tokenizers do."""
        return self._whole.apply_chat_template(turns, **options)


def from_folder(folder: Path) -> Any:
    """Return the tokenizer of a snapshot folder; nothing is fetched and no code in it is run.

    tokenizer.json says all there is; where it lacks, transformers builds one of other files, and imports torch for it.
    """
    try:
        return _plain(folder) or _whole(folder)
    except Exception as error:  # the libraries raise many kinds for a broken file
        text = str(error).strip().splitlines()
        detail = text[0] if text else type(error).__name__
        raise UserError(f"{folder}: the tokenizer files cannot be read ({detail}); {WITHOUT}") from None


def _whole(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        if not (folder / "tokenizer_config.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _plain(folder: Path) -> PlainTokenizer | None:
    """Return the tokenizer of tokenizer.json alone, or nothing where the files beside it add to it or change it."""
    if not (folder / "tokenizer.json").is_file() or (folder / "added_tokens.json").exists():
        return None
    beside = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    files = [_read_settings(path) for path in beside if path.is_file()]
    if not all(said.keys() <= SILENT | NAMED for said in files):
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = {str(i): _token_fields(token) for i, token in backend.get_added_tokens_decoder().items()}
    added = [x for said in files for x in (said.get("added_tokens_decoder") or {}).items()]
    named = [said[key] for said in files for key in NAMED if said.get(key) is not None]
    named += [token for said in files for token in said.get("additional_special_tokens") or ()]
    bpe = type(backend.model).__name__ == "BPE"  # what transformers decodes by other kinds, it cleans up
    if (
        not {_token_fields(token)["content"] for token in named} <= {token["content"] for token in known.values()}
        or any(known.get(i) != _token_fields(token) for i, token in added)
        or (not bpe and any(said.get("clean_up_tokenization_spaces") for said in files))
        or backend.get_vocab_size() > LARGEST
    ):
        return None
    backend.no_truncation()
    backend.no_padding()
    return PlainTokenizer(backend, lambda: _whole(folder))


def _read_settings(path: Path) -> dict[str, Any]:
    """Return what a file of settings says; raises ValueError naming the file where it is no JSON object."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path.name}: it is no JSON object")
    return said


def _token_fields(token: object) -> dict[str, Any]:
    """Return what an added token is, whether a file writes it or the library does."""
    if isinstance(token, str):
        return {"content": token}
    get = token.get if isinstance(token, dict) else partial(getattr, token)
    if not isinstance(content := get("content", None), str):
        raise ValueError(f"the content of a special token is of type {type(content).__name__}, no text")
    return {key: get(key, None) for key in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")}


def tokenizer_from_gguf(metadata: dict[str, Any], where: str) -> Any:
    """Return the tokenizer of GGUF metadata: byte-level BPE here, other kinds by transformers' converter."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or kind not in GGUF_PRETOKENIZERS:
        return _convert_tokenizer(metadata, where)
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
    return PlainTokenizer(tokenizer, partial(_with_template, tokenizer, metadata.get("tokenizer.chat_template")))


def _with_template(tokenizer: Any, template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return fast


def _convert_tokenizer(metadata: dict[str, Any], where: str) -> Any:
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
