"""Tokenizers of GGUF files against transformers' own conversion, on 200 strings a kind."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.checkpoints.gguf_files import GgufFile
from precaudit.models.checkpoints.tokenizers import GGUF_PRETOKENIZERS, PlainTokenizer, from_folder, tokenizer_from_gguf
from precaudit.recording.tracing.subject import load
from precaudit.schema.prompts import shipped_prompts

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
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    gguf = pytest.importorskip(name, reason="this transformers has its GGUF conversion elsewhere")
    table, settings = (
        {ours: file.metadata[f"tokenizer.{key}"] for key, ours in names.items() if f"tokenizer.{key}" in file.metadata}
        for names in gguf.GGUF_TOKENIZER_MAPPING.values()
    )
    backend, _ = gguf.convert_gguf_tokenizer("llama", table | {"pre_tokenizer_type": kind})
    if kind == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), byte_level])
    return backend, settings


@pytest.mark.parametrize("kind", GGUF_PRETOKENIZERS)
def test_two_hundred_strings(smollm2, kind):
    ours = tokenizer_from_gguf(smollm2.metadata | {"tokenizer.ggml.pre": kind}, str(smollm2.path))
    backend, _ = theirs(smollm2, kind)
    texts = strings(kind)
    assert len(texts) == 200
    for text in texts:
        want = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == want, text


def test_chats(smollm2):
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer_from_gguf(smollm2.metadata, str(smollm2.path))
    backend, settings = theirs(smollm2, "smollm")
    other = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    other.chat_template = smollm2.metadata["tokenizer.chat_template"]
    for text in strings("chat"):
        chat = [{"role": "user", "content": text}]
        a, b = (t.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for t in (ours, other))
        assert a == b
        assert ours.encode(a, add_special_tokens=False) == backend.encode(a, add_special_tokens=False).ids


def test_a_sentencepiece_file_needs_no_torch():
    """Merges are recovered from the scores: ▁ab is the best piece of " ab"; what is unknown goes byte by byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    normal = 6
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * (len(pieces) - normal) + [-9.0, -8.0, -7.0, -3.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * normal,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    made = tokenizer_from_gguf(metadata, "m.gguf")
    assert made.encode("ab", add_special_tokens=False) == [pieces.index("▁ab")]
    assert made.encode("é", add_special_tokens=False)[-2:] == [pieces.index("<0xC3>"), pieces.index("<0xA9>")]
    assert (made.bos_token, made.eos_token) == ("<s>", "</s>")


def test_user_defined_tokens_are_whole(smollm2):
    """Type 4, as <think> has in files of Qwen3: one token, not cut into pieces."""
    tokens, kinds = list(smollm2.metadata["tokenizer.ggml.tokens"]), list(smollm2.metadata["tokenizer.ggml.token_type"])
    tokens[3], kinds[3] = "<think>", 4
    made = tokenizer_from_gguf(
        smollm2.metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}, str(smollm2.path)
    )
    assert made.encode("<think>\nhi", add_special_tokens=False)[0] == 3
    assert made.decode([3], skip_special_tokens=True) == "<think>"


def test_a_broken_tokenizer_is_named():
    with pytest.raises(UserError, match=r"m\.gguf: the tokenizer cannot be read"):
        tokenizer_from_gguf({"general.architecture": "llama", "tokenizer.ggml.model": "llama"}, "m.gguf")


REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
)


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize(
    ("template", "left_out"),
    [(None, ["p4_sys", "p5_ba"]), (REFUSES_SYSTEM, ["p4_sys"]), ("{{ nothing.there.is }}", ["p4_sys", "p5_ba"])],
)
def test_shipped_chats_a_model_takes_not_are_left_out_and_named(tmp_path, capfd, template, left_out):
    """A base model has no chat template; some templates refuse a system role."""
    source = Path(load("tiny", device="cpu").checkpoint.path)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    for extra in folder.glob("chat_template*"):
        extra.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    arguments = [
        "trace",
        str(folder),
        "-o",
        str(tmp_path / "run"),
        "--points",
        "v",
        "--layers",
        "0",
        "--phases",
        "prefill",
    ]
    assert run(arguments) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("left out: ")]
    assert [line.split("'")[1] for line in said] == left_out
    assert all("give it as text or as token ids" in line for line in said)
    kept = [json.loads(line)["id"] for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert len(kept) == len(shipped_prompts()) - len(left_out)
    assert run([*arguments, "--force", "--prompt", "p4_sys"]) == 2  # asked for by name, it is an error
    assert "chat template does not take it" in capfd.readouterr().err


def test_a_folder_s_tokenizer_needs_no_torch(tmp_path):
    """tokenizer.json is read as it is: torch is not imported where it is installed, nor config.json read."""
    from transformers import AutoTokenizer

    folder = tmp_path / "tiny"
    shutil.copytree(Path(precaudit.__file__).parent / "bundled" / "tiny", folder)
    texts = [p.prompt for p in shipped_prompts() if isinstance(p.prompt, str)]
    other = AutoTokenizer.from_pretrained(str(folder))
    want = [other.encode(t, add_special_tokens=False) for t in texts]
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "auto"}))
    code = (
        "import json, sys; from pathlib import Path; from precaudit.models.checkpoints.tokenizers import from_folder;"
        f"t = from_folder(Path({str(folder)!r}));"
        f"ids = [t.encode(x, add_special_tokens=False) for x in json.loads(sys.stdin.read())];"
        "print(json.dumps([ids, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(texts), capture_output=True, text=True)
    assert json.loads(done.stdout) == [want, False], done.stderr


FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
EXTRA = FLAGS | {"content": "<new>"}
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
STORED = EXTRA | {"content": "<|im_start|>"}


@pytest.mark.parametrize(
    ("name", "said", "plain"),
    [
        ("tokenizer_config.json", {}, True),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": STORED}}, True),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": STORED | {"rstrip": True}}}, False),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": EXTRA}}, False),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_end|>"]}, True),
        ("tokenizer_config.json", {"additional_special_tokens": ["<new>"]}, False),
        ("tokenizer_config.json", {"unk_token": "<new>"}, False),
        ("tokenizer_config.json", {"unk_token": EXTRA | {"__type": "AddedToken"}}, False),
        ("tokenizer_config.json", {"add_bos_token": True}, False),
        ("tokenizer_config.json", {"split_special_tokens": True}, False),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True, "model_max_length": 8}, True),
        ("special_tokens_map.json", {"pad_token": "<|pad|>"}, True),
        ("special_tokens_map.json", {"pad_token": "<new>"}, False),
        ("tokenizer.json", {"truncation": CUT}, True),
        ("tokenizer.json", {"post_processor": None}, True),
    ],
)  # fmt: skip
def test_what_stands_beside_tokenizer_json_is_read_as_transformers_does(tmp_path, name, said, plain):
    """Where it adds nothing the one file is read without transformers; where it does, transformers reads it."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    shutil.copytree(Path(precaudit.__file__).parent / "bundled" / "tiny", folder)
    whole = folder / name
    whole.write_text(json.dumps((json.loads(whole.read_text()) if whole.exists() else {}) | said))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(folder)), from_folder(folder)
    assert isinstance(ours, PlainTokenizer) == plain
    assert len(ours) == len(theirs)
    for text in (*strings(3)[:80], "a <new> b", "<|im_start|> user\n<|pad|> x"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    turns = [{"role": "user", "content": "Hi"}]
    how = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(turns, **how) == theirs.apply_chat_template(turns, **how)


@pytest.mark.parametrize(("text", "why"), [("{bad", "Expecting property name"), ('["a"]', "it is no JSON object")])
def test_a_broken_file_beside_tokenizer_json_is_named(tmp_path, text, why):
    folder = tmp_path / "model"
    shutil.copytree(Path(precaudit.__file__).parent / "bundled" / "tiny", folder)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {why}"):
        from_folder(folder)


@pytest.mark.parametrize("content", [["a"], {}, 3, None])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, content):
    folder = tmp_path / "model"
    shutil.copytree(Path(precaudit.__file__).parent / "bundled" / "tiny", folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": content}}))
    with pytest.raises(UserError, match=f"the content of a special token is of type {type(content).__name__}, no text"):
        from_folder(folder)
