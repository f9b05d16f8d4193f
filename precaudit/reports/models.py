"""What models are supported, and what one is, as text and tables."""

import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from precaudit.models.checkpoints.gguf_files import kinds
from precaudit.models.checkpoints.inspection import TensorCheck, formats
from precaudit.models.checkpoints.opening import Checkpoint, installed
from precaudit.models.checkpoints.safetensors_files import DTYPES
from precaudit.models.configs import FAMILIES, DecoderConfig
from precaudit.models.configs.gguf import ARCHITECTURES
from precaudit.reports.escaping import terminal
from precaudit.schema.coverage import predicted_bytes
from precaudit.schema.graphs.decoder import DEFAULT_POINTS, POINTS, present, support
from precaudit.schema.policies import load_policy
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import PHASES

TOKENS, STEPS = 512, 8  # the prompt a run's size is told for
PACKAGES = ("jax", "jaxlib", "libtpu", "transformers", "tokenizers", "gguf", "safetensors", "huggingface_hub")


def supported() -> dict[str, str]:
    """Return what can be opened, and the versions installed."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return {
        "families": ", ".join(FAMILIES),
        "folders": f"config.json with safetensors ({', '.join(DTYPES)}; float8 with scales), single or sharded",
        "GGUF": f"{', '.join(ARCHITECTURES)} in {', '.join(kinds())}",
        "hub ids": "owner/model or owner/model@revision, from the cache or fetched",
        "names": "; ".join(f"{name}: {'installed' if there else how}" for name, (there, how) in installed().items()),
        "points": ", ".join(POINTS),
        "installed": ", ".join(versions),
    }


def described(opened: Checkpoint) -> dict[str, str]:
    """Return what a checkpoint is and how large a run of it would be."""
    c = opened.config
    held = ", ".join(f"{n} tensors {name}" for name, n in sorted(formats(opened).items()))
    size = sum(p.stat().st_size for p in opened.hashes.paths)
    points = present(c.sparse)
    default = (*DEFAULT_POINTS, *support(DEFAULT_POINTS, PHASES, c.sparse, True))
    return {
        "model": f"{opened.name} at {opened.path}",
        "family": c.family,
        "size": f"{c.parameters / 1e6:,.1f} M parameters in {len(opened.hashes.paths)} files of {size / 1e6:,.1f} MB",
        "shape": f"{c.layers} layers, width {c.width}, {c.heads} heads over {c.kv_heads} key/value heads of "
        f"{c.head_dim}, MLP {c.mlp_width}, vocabulary {c.vocab}, context {c.context}",
        "formats": held,
        "variations": _variations(c),
        "points": ", ".join(points),
        "a run": f"of {TOKENS} tokens and {STEPS} decode steps in bf16 writes about {_megabytes(c, default)} (default "
        f"points) or {_megabytes(c, points)} (--points all)",
    }


def _variations(c: DecoderConfig) -> str:
    """Return where a configuration leaves the plain decoder."""
    defaults = c.__struct_defaults__
    names = c.__struct_fields__[-len(defaults) :]
    pairs = [(name, getattr(c, name), default) for name, default in zip(names, defaults, strict=True)]
    found = [f"{name} {value}" for name, value, default in pairs if value != default]
    return "; ".join(["tied embeddings"] * c.tied + found) or "none"


def _megabytes(c: DecoderConfig, points: tuple[str, ...]) -> str:
    requested = Requested(
        prompts=("p",), layers=tuple(range(c.layers)), points=points, support=(), phases=PHASES, positions=None,
        every_logit=False, decode_steps=STEPS, batch=1, pad="right", tokens_from=None,
    )  # fmt: skip
    return f"{predicted_bytes(requested, c, load_policy('bf16'), [TOKENS]) / 1e6:,.1f} MB"


def text(table: dict[str, str]) -> str:
    """Return a table as lines of ``name  text``."""
    return "\n".join(f"{name:11} {value}" for name, value in table.items())


def as_json(table: dict[str, Any]) -> str:
    """Return a table as one line of JSON."""
    return json.dumps(table)


def show_checked(opened: Checkpoint, found: Sequence[TensorCheck], console: Any) -> None:
    """Print one line for every tensor that is not finite, and a summary."""
    bad = [t for t in found if t.nonfinite]
    for t in bad:
        line = f"{terminal(t.name)} {list(t.shape)} {t.format}: {t.nonfinite} values are NaN or infinite"
        console.print(line, soft_wrap=True, markup=False)
    total = sum(t.largest > 0 for t in found)
    state = "all finite" if not bad else f"{len(bad)} of them not finite"
    zeros = f"; {len(found) - total} hold only zeros" if total < len(found) else ""
    console.print(
        f"{terminal(opened.name)}: {len(found)} tensors read, shapes as the configuration implies, {state}{zeros}; "
        f"SHA-256 of the files {opened.hashes.sha256()}",
        soft_wrap=True,
        markup=False,
    )
