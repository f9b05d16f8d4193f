"""The verb ``audit``: trace, compare and gate as precaudit.toml says. And its starter, ``init``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from precaudit.caching import cache_folder
from precaudit.errors import UserError, nearest
from precaudit.judging.gate import Judgement, gate
from precaudit.policies import apply_settings, load_policy
from precaudit.progress import Advance, Progress, silent
from precaudit.selection import Selection
from precaudit.writing import write_whole

FILES = {
    "precaudit.toml": "precaudit.toml",
    "budgets.toml": "budgets.toml",
    "workflow.yml": ".github/workflows/precaudit.yml",
}


class AuditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """precaudit.toml. Paths are relative to the file; what is left out is as in ``precaudit trace``."""

    subject: str
    output: str = "traces/runs/audit"
    policy: str = "bf16"
    set: dict[str, str] = {}
    prompts: str | None = None
    prompt: list[str] | None = None
    layers: str | None = None
    points: str | None = None
    phases: str | None = None
    positions: str | None = None
    decode_steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 8
    batch: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1
    pad: str = "right"
    device: str = "auto"
    allow_field: list[str] = []
    accum: list[str] = []
    formula: bool = True
    budgets: str | None = None
    baseline: str | None = None
    across_devices: bool = False


@dataclass(frozen=True)
class Audit:
    """What audit did: where the run is, and its judgement."""

    run: Path
    judgement: Judgement = field(repr=False)


def read_config(path: Path) -> AuditConfig:
    """Read precaudit.toml; raises UserError naming the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {path}; make one with: precaudit init") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    for key in table:
        if key not in AuditConfig.__struct_fields__:
            raise UserError(f"{path}: unknown key {key!r}{nearest(key, AuditConfig.__struct_fields__)}")
    try:
        return msgspec.convert(table, AuditConfig)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from None


def audit(
    config: Path | str = "precaudit.toml",
    settings: Mapping[str, str] | None = None,
    tell: Advance = silent,
    cache: Path | None = None,
) -> Audit:
    """Trace, compare and gate as ``config`` says; ``settings`` replace single policy keys, ``cache`` holds references.

    The run replaces the one of the audit before. Raises UserError for what is wrong in any of the files.
    """
    from precaudit.comparison.compare import Options as CompareOptions
    from precaudit.comparison.compare import compare
    from precaudit.tracing.subject import load
    from precaudit.tracing.trace import Options, trace

    path = Path(config)
    c, root = read_config(path), path.parent
    policy = apply_settings(load_policy(_beside(root, c.policy, ".toml")), {**c.set, **(settings or {})})
    select = Selection.parse(c.layers, c.points, c.phases, c.positions, ",".join(c.prompt) if c.prompt else None)
    subject = load(_beside(root, c.subject), policy, device=c.device, allow=c.allow_field)
    traced = Options(c.decode_steps, c.batch, c.pad, None, True, f"precaudit audit --config {path}")
    prompts = root / c.prompts if c.prompts is not None else None
    run = trace(subject, root / c.output, prompts, select, traced, Progress(advance=tell))
    options = CompareOptions(
        accum=tuple(c.accum), formula=c.formula, cache=cache_folder("references") if cache is None else cache
    )
    found = compare(run, options=options, tell=tell)
    budgets = root / c.budgets if c.budgets is not None else None
    baseline = root / c.baseline if c.baseline is not None else None
    return Audit(run.folder, gate(found, budgets, baseline, c.across_devices))


def _beside(root: Path, name: str, suffix: str = "") -> str:
    """Return a path beside the configuration where there is one, else the name as it is."""
    found = root / name
    return str(found) if found.exists() and name.endswith(suffix) else name


def init(folder: Path) -> list[Path]:
    """Write a commented precaudit.toml, budgets.toml and GitHub workflow; raises UserError where one is there."""
    templates = resources.files("precaudit") / "templates"
    there = [folder / name for name in FILES.values() if (folder / name).exists()]
    if there:
        raise UserError(f"{there[0]} exists; nothing was written")
    written = []
    for source, name in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (templates / source).read_text(encoding="utf-8"))
        written.append(path)
    return written
