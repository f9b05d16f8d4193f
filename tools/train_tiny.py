"""Train the bundled model ``tiny`` on the text of CPython's standard library and write it with its model card.

    python tools/train_tiny.py [--steps 2000] [-o precaudit/bundled/tiny]

Needs ``pip install -e .[train]`` (optax). Everything is seeded; the text is that of the running Python.
"""

import argparse
import hashlib
import json
import platform
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from precaudit.models.configs import from_config_json, model_tensors
from precaudit.models.jax_decoder.arithmetic import Arithmetic
from precaudit.models.jax_decoder.decoder import Decoder
from precaudit.models.jax_decoder.family import family_parts, layer_tensors
from precaudit.models.jax_decoder.parameters import parameters, rope_tables
from precaudit.schema.policies import load_policy

SEED, BATCH, WINDOW, RATE = 20240521, 8, 512, 3e-3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 260,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 259,
    "torch_dtype": "bfloat16",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without a merge: token i is byte i, special tokens follow."""
    alphabet = {}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(256):
        # UTF-8 texts hold every byte below 0x80 and, in multi-byte characters, those above.
        alphabet[byte] = _byte_characters()[byte]
    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in alphabet.items()}, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable stand-ins byte-level BPE uses: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, free = {}, 256
    for byte in range(256):
        table[byte] = chr(byte) if byte in printable else chr(free)
        free += byte not in printable
    return [table[b] for b in range(256)]


def corpus() -> tuple[np.ndarray, np.ndarray, str]:
    """Return training bytes, held-out bytes (every 40th file) and the SHA-256 of all text."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "idle_test"} & set(p.parts))
    train, held, digest = [], [], hashlib.sha256()
    for i, path in enumerate(files):
        text = path.read_bytes()
        digest.update(text)
        (held if i % 40 == 7 else train).append(np.append(np.frombuffer(text, np.uint8), 256).astype(np.int32))
    return np.concatenate(train), np.concatenate(held), digest.hexdigest()


def initial_tensors(config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal weights of deviation 0.02·(smaller where they feed the residual), norms one."""
    tensors = {}
    for name, shape in model_tensors(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        else:
            scale = 0.06 / np.sqrt(2 * config.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.06
            tensors[name] = rng.normal(0, scale, shape).astype(np.float32)
    return tensors


def checkpoint_tensors(config, params) -> dict[str, np.ndarray]:
    """Undo ``parameters``: stacked layers back to one tensor a layer, in bfloat16."""
    out = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    for ours, theirs in layer_tensors(config).items():
        if ours in params["layers"]:
            for i in range(config.layers):
                out[f"model.layers.{i}.{theirs}"] = params["layers"][ours][i]
    return {k: np.asarray(v).astype(ml_dtypes.bfloat16) for k, v in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("-o", "--output", type=Path, default=Path("precaudit/bundled/tiny"))
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    config, policy = from_config_json(CONFIG, "tiny"), load_policy("fp32")
    decoder = Decoder(config, Arithmetic.of(policy), family_parts(config))
    tables = jax.tree.map(jnp.asarray, rope_tables(config, WINDOW, policy))
    tensors = initial_tensors(config, rng)
    params = parameters(config, tensors.__getitem__, lambda _name: None, np.float32, lambda *_: jax.devices()[0])
    rows = jnp.broadcast_to(jnp.arange(WINDOW), (BATCH, WINDOW))

    def loss_of(params, tokens):
        logits, _ = decoder.prefill(params, tables, tokens[:, :-1], jnp.zeros(BATCH, jnp.int32), rows, None)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, min(100, args.steps // 2), args.steps, RATE / 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    train, held, digest = corpus()
    began = time.time()
    for step in range(args.steps):
        at = rng.integers(0, len(train) - WINDOW - 1, BATCH)
        params, state, loss = update(params, state, np.stack([train[i : i + WINDOW + 1] for i in at]))
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step} loss {float(loss):.4f} {time.time() - began:.0f} s", flush=True)
    final = checkpoint_tensors(config, params)
    params = parameters(config, final.__getitem__, lambda _name: None, np.float32, lambda *_: jax.devices()[0])
    at = np.linspace(0, len(held) - WINDOW - 2, 8 * BATCH).astype(int)
    windows = np.stack([held[i : i + WINDOW + 1] for i in at]).reshape(8, BATCH, -1)
    held_loss = float(np.mean([jax.jit(loss_of)(params, w) for w in windows]))
    tokenizer = byte_tokenizer()
    sample = generate(decoder, params, tokenizer, policy, "def main(", 160)
    write(args.output, final, tokenizer, card(config, args.steps, len(train), digest, held_loss, sample))


def generate(decoder, params, tokenizer, policy, prompt: str, count: int) -> str:
    """Continue ``prompt`` greedily."""
    ids = tokenizer.encode(prompt).ids
    tables = jax.tree.map(jnp.asarray, rope_tables(decoder.config, WINDOW, policy))
    zero, cache = jnp.zeros(1, jnp.int32), decoder.init_cache(1, WINDOW)
    logits, cache = jax.jit(decoder.prefill)(
        params, tables, jnp.asarray([ids]), zero, zero[:, None] + len(ids) - 1, cache
    )
    decode = jax.jit(decoder.decode, donate_argnums=5)
    for _ in range(count):
        ids.append(int(jnp.argmax(logits[0, 0])))
        logits, cache = decode(params, tables, jnp.asarray(ids[-1:]), zero, zero + len(ids) - 1, cache)
    return tokenizer.decode(ids)


def card(config, steps: int, n: int, digest: str, held_loss: float, sample: str) -> str:
    """The model card, from what was measured in this run."""
    return f"""# tiny

A byte-level Llama of {config.parameters:,} parameters ({config.layers} layers, width {config.width}, {config.heads}
query and {config.kv_heads} key/value heads, SwiGLU {config.mlp_width}, tied embeddings), trained for precaudit's
tests and examples. It writes text that looks like Python and knows nothing.

- Data: the `.py` files of CPython {platform.python_version()}'s standard library without its tests
  ({n:,} bytes in training; every 40th file held out; SHA-256 of the text
  {digest}). CPython's licence is the PSF License.
- Training: `python tools/train_tiny.py --steps {steps}`: {steps} steps of {BATCH} windows of
  {WINDOW} bytes, AdamW, seed {SEED}, float32; weights rounded once to bfloat16.
  Positions past {WINDOW} were never trained on.
- Held-out loss of the bfloat16 weights: {held_loss:.3f} nats per byte ({held_loss / np.log(2):.3f} bits per byte).
- Licence of the weights: Apache-2.0.

Greedy continuation of `def main(`:

```
{sample}
```
"""


def write(folder: Path, tensors, tokenizer: Tokenizer, text: str) -> None:
    """Write a Hugging Face snapshot folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "pad_token": SPECIAL[3]}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens, indent=1) + "\n")
    (folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
