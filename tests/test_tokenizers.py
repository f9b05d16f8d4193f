"""Tokenizers of GGUF files against transformers' own conversion, on 200 strings a kind."""

import random

import pytest
from tokenizers import Regex, pre_tokenizers

from precaudit.checkpoints import open_checkpoint
from precaudit.checkpoints.gguf_files import GgufFile
from precaudit.checkpoints.tokenizers import GGUF_PRETOKENIZERS, from_gguf

PIECES = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "The",
    " quick",
    "brown\u00a0fox",
    "don't",
    "I'LL",
    "we'Re",
    "x=1",
    "0",
    "7",
    "42",
    "1234567",
    "3.14159",
    "1e-9",
    "0x1F",
    "def f(x):\n    return x",
    '{"k": [1, 2]}',
    "a_b",
    "camelCase",
    "...",
    "?!",
    "--",
    "€",
    "naïve",
    "Straße",
    "ﬁ",
    "日本語",
    "한국어",
    "العربية",
    "हिन्दी",
    "עברית",
    "Ελληνικά",
    "русский",
    "e\u0301",
    "\u200b",
    "👍",
    "👩‍💻",
    "🏳️‍🌈",
    "\x00",
    "\x7f",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<s>",
    "[INST]",
    "\r\n",
    "tab\tend ",
    "²³",
    "٣",
    "½",
)


def strings(seed):
    """Every piece, and joins of pieces, 200 in all."""
    r = random.Random(seed)
    joined = ["".join(r.choices(PIECES, k=r.randrange(2, 9))) for _ in range(200 - len(PIECES))]
    return [*PIECES, *joined]


@pytest.fixture(scope="module")
def smollm2():
    return GgufFile.open(open_checkpoint("smollm2").path)


def theirs(file, kind):
    """Return transformers' conversion of the file's tokenizer under another pre-tokenizer.

    It does not know ``smollm`` and leaves its digits together; llama.cpp's rule (llama-vocab.cpp) is put in.
    """
    gguf = pytest.importorskip("transformers.integrations.gguf", reason="transformers has its GGUF reader elsewhere")
    architecture, table, settings = gguf.get_gguf_tokenizer(str(file.path))
    key = next(k for k in table if "pre" in k)
    backend, _ = gguf.convert_gguf_tokenizer(architecture, table | {key: kind})
    if kind == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), byte_level])
    return backend, settings


@pytest.mark.parametrize("kind", GGUF_PRETOKENIZERS)
def test_two_hundred_strings(smollm2, kind):
    ours = from_gguf(smollm2.metadata | {"tokenizer.ggml.pre": kind}, str(smollm2.path))
    backend, _ = theirs(smollm2, kind)
    texts = strings(kind)
    assert len(texts) == 200
    for text in texts:
        want = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == want, text


def test_chats(smollm2):
    from transformers import PreTrainedTokenizerFast

    ours = from_gguf(smollm2.metadata, str(smollm2.path))
    backend, settings = theirs(smollm2, "smollm")
    other = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    other.chat_template = smollm2.metadata["tokenizer.chat_template"]
    for text in strings("chat"):
        chat = [{"role": "user", "content": text}]
        a, b = (t.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for t in (ours, other))
        assert a == b
        assert ours.encode(a, add_special_tokens=False) == backend.encode(a, add_special_tokens=False).ids
