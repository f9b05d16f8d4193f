"""What models are supported, and what one is, as text and tables."""

from collections.abc import Sequence
from importlib import metadata

from precaudit.models.checkpoints.gguf_files import kinds
from precaudit.models.checkpoints.inspection import TensorCheck, tensor_formats
from precaudit.models.checkpoints.opening import Checkpoint, named_models
from precaudit.models.checkpoints.safetensors_files import DTYPES
from precaudit.models.configs import FAMILIES, DecoderConfig
from precaudit.models.configs.gguf import ARCHITECTURES
from precaudit.numbers.bytes_text import bytes_text
from precaudit.reports.report import Report, Section
from precaudit.schema.coverage import predicted_bytes
from precaudit.schema.digits import count_text
from precaudit.schema.graphs.decoder import DEFAULT_POINTS, POINTS, present, support
from precaudit.schema.policies import load_policy
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import PHASES

TOKENS, STEPS = 512, 8  # the prompt a run's size is told for
PACKAGES = ("jax", "jaxlib", "libtpu", "transformers", "tokenizers", "gguf", "safetensors", "huggingface_hub")


def models_report(opened: Checkpoint | None = None) -> Report:
    """Return the report of what can be opened, and the versions installed; or of a checkpoint, and a run of it."""
    facts = _support_table() if opened is None else _describe(opened)
    return Report(None, (Section(facts=tuple(facts.items())),), records=(facts,))


def check_report(opened: Checkpoint, found: Sequence[TensorCheck]) -> Report:
    """Return the report of a checkpoint's tensors: a line for each that is not finite, and a summary."""
    bad = [t for t in found if t.nonfinite]
    lines = [f"{t.name} {list(t.shape)} {t.format}: {t.nonfinite} values are NaN or infinite" for t in bad]
    total = sum(t.largest > 0 for t in found)
    state = "all finite" if not bad else f"{len(bad)} of them not finite"
    zeros = f"; {len(found) - total} hold only zeros" if total < len(found) else ""
    lines.append(
        f"{opened.name}: {len(found)} tensors read, shapes as the configuration implies, {state}{zeros}; "
        f"SHA-256 of the files {opened.hashes.sha256()}"
    )
    return Report(None, (Section(lines=tuple(lines)),), records=[t._asdict() for t in found])


def _support_table() -> dict[str, str]:
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
        "names": "; ".join(f"{name}: {'installed' if there else how}" for name, (there, how) in named_models().items()),
        "points": ", ".join(POINTS),
        "installed": ", ".join(versions),
    }


def _describe(opened: Checkpoint) -> dict[str, str]:
    c = opened.config
    held = ", ".join(f"{n} tensors {name}" for name, n in sorted(tensor_formats(opened).items()))
    size = sum(p.stat().st_size for p in opened.hashes.paths)
    points = present(c.sparse)
    default = (*DEFAULT_POINTS, *support(DEFAULT_POINTS, PHASES, c.sparse, True))
    return {
        "model": f"{opened.name} at {opened.path}",
        "family": c.family,
        "size": f"{c.parameters / 1e6:,.1f} M parameters in "
        f"{count_text(len(opened.hashes.paths), 'file')} of {bytes_text(size)}",
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
        prompts=("p",),
        layers=tuple(range(c.layers)),
        points=points,
        support=(),
        phases=PHASES,
        positions=None,
        every_logit=False,
        decode_steps=STEPS,
        batch=1,
        pad="right",
        tokens_from=None,
    )
    return bytes_text(predicted_bytes(requested, c, load_policy("bf16"), [TOKENS]))
