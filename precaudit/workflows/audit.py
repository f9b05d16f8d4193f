"""The verb ``audit``: trace, compare, gate and, where that fails, diagnose as precaudit.toml says."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from precaudit.caching import cache_folder
from precaudit.errors import CannotJudge, PrecauditError, UserError
from precaudit.judging.gate import gate
from precaudit.judging.judgement import Judgement
from precaudit.mirrors import path_of
from precaudit.progress import Advance, Progress, silent
from precaudit.recording.runs.compared_programs import recall_program
from precaudit.recording.runs.written import Comparison
from precaudit.schema.policies import apply_settings, load_policy
from precaudit.schema.selection import Selection
from precaudit.schema.toml import of_table, read_toml

# What precaudit.toml may say of a program, and what of programs alone; the rest is of models.
ANY = frozenset(("subject", "output", "layers", "budgets", "baseline", "across_devices", "diagnose"))
PROGRAMS = frozenset(("reference", "map", "config", "family", "model"))
COMMANDS = ANY - {"subject"} | {"command", "function", "calls", "points", "positions"}


class AuditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """precaudit.toml. Paths are relative to the file; what is left out is as in ``precaudit trace`` and ``compare``."""

    subject: str = ""
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
    diagnose: bool = True
    reference: str | None = None
    map: str | None = None
    config: str | None = None
    family: str | None = None
    model: str | None = None
    command: str | None = None
    function: str | None = None
    calls: str | None = None


@dataclass(frozen=True)
class Audit:
    """What audit did: where the run is, its judgement, what was compared, and the diagnosis of what fails.

    ``compared``: what compare found; ``diagnosis``: None where none was asked for,
    or needed, else as of ``precaudit.workflows.verbs.diagnose``, or the sentence that says why there is none.
    """

    run: Path
    judgement: Judgement = field(repr=False)
    compared: Comparison[Any] = field(repr=False)
    diagnosis: Any = field(default=None, repr=False)


def read_config(path: Path) -> AuditConfig:
    """Read precaudit.toml; raises UserError naming the file and the key."""
    table = read_toml(path, f"no {path}; make one with: precaudit init")
    found = of_table(table, AuditConfig, str(path))
    if found.command is not None:
        if other := table.keys() - COMMANDS:
            raise UserError(f"{path}: a command is watched as it runs; leave out {', '.join(sorted(other))}")
        if found.function is None:
            raise UserError(
                f'{path}: which function\'s calls? function = "NAME"; precaudit watch -- {found.command} lists'
            )
        return found
    if not found.subject:
        raise UserError(f"{path}: subject = what is audited, or command = a script that is watched")
    if other := table.keys() & {"function", "calls"}:
        raise UserError(f"{path}: {', '.join(sorted(other))} are of a command; leave out {', '.join(sorted(other))}")
    own = is_program(found.subject, path.parent)
    other = table.keys() - ANY - PROGRAMS if own else table.keys() & PROGRAMS
    if other:
        why = "a program says itself what it runs on" if own else f"{found.subject} is no program"
        raise UserError(f"{path}: {why}; leave out {', '.join(sorted(other))}")
    return found


def is_program(subject: str, root: Path) -> bool:
    """Whether a subject beside ``root`` is a program, FILE.py:NAME or module:NAME."""
    from precaudit.recording.programs.loading import is_reference

    return is_reference(subject) and not (root / subject).exists()


def audit(
    config: Path | str = "precaudit.toml",
    settings: Mapping[str, str] | None = None,
    tell: Advance = silent,
    cache: Path | None = None,
) -> Audit:
    """Trace, compare and gate as ``config`` says, and diagnose what fails.

    ``settings`` replace single policy keys, ``cache`` holds references. The run replaces the one of the audit before.
    Raises UserError for what is wrong in any of the files.
    """
    path = Path(config)
    c, root = read_config(path), path.parent
    if c.command is not None:
        if settings:
            raise UserError(f"--set: {c.command} says itself what it runs on; leave it out")
        return _command(c, c.command, path)
    if not is_program(c.subject, root):
        return _model(c, path, settings or {}, tell, cache_folder("references") if cache is None else cache)
    if settings:
        raise UserError(f"--set: {c.subject} is a program, which says itself what it runs on; leave it out")
    return _program(c, path, tell)


def _model(c: AuditConfig, path: Path, settings: Mapping[str, str], tell: Advance, cache: Path) -> Audit:
    from precaudit.recording.tracing.subject import load
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.references.comparison.compare import CompareOptions as CompareOptions
    from precaudit.workflows.verbs import compare, diagnose, trace

    root = path.parent
    policy = apply_settings(load_policy(_beside(root, c.policy, ".toml")), {**c.set, **settings})
    select = Selection.parse(c.layers, c.points, c.phases, c.positions, ",".join(c.prompt) if c.prompt else None)
    subject = load(_beside(root, c.subject), policy, device=c.device, allow=c.allow_field)
    traced = TraceOptions(c.decode_steps, c.batch, c.pad, None, True, f"precaudit audit --config {path}")
    prompts = path_of(c.prompts, root) if c.prompts is not None else None
    run = trace(subject, path_of(c.output, root), prompts, select, traced, Progress(advance=tell))
    options = CompareOptions(accum=tuple(c.accum), formula=c.formula, cache=cache)
    found = compare(run, options=options, progress=tell)
    judgement = _judge(c, root, found)
    why = _diagnose(c, judgement, lambda: diagnose(run, options=CompareOptions(accum=(), cache=cache), progress=tell))
    return Audit(run.folder, judgement, found, why)


def _program(c: AuditConfig, path: Path, tell: Advance) -> Audit:
    from precaudit.recording.programs.loading import load_function, load_program, trust
    from precaudit.recording.programs.planning import longest_scan
    from precaudit.references.names_map import names_of
    from precaudit.schema.selection import parse_layers
    from precaudit.workflows.verbs import compare, diagnose, trace

    root, name = path.parent, beside_program(path.parent, c.subject)
    own = None if c.reference is None else beside_program(root, c.reference)
    given = {key: None if (x := getattr(c, key)) is None else root / x for key in ("map", "config")}
    reference = names_of(given["map"], given["config"], c.family) or (None if own is None else load_function(own))
    if given["map"] is not None and own is not None:
        raise UserError(f"{path}: give reference or map, not both")
    program = load_program(name)
    chosen = None if c.layers is None else parse_layers(c.layers, longest_scan(program))
    said = f"precaudit audit --config {path}"
    run = trace(
        program, path_of(c.output, root), reference=name, force=True, command=said, progress=tell, layers=chosen
    )
    trust(name)
    model = None if c.model is None else _beside(root, c.model)
    found = compare(run, program=program, reference=reference, model=model, progress=tell)
    judgement = _judge(c, root, run.folder)
    return Audit(run.folder, judgement, found, _diagnose(c, judgement, lambda: diagnose(run, program, progress=tell)))


def _command(c: AuditConfig, command: str, path: Path) -> Audit:
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.workflows.watch import watch

    root = path.parent
    found = watch(
        shlex.split(command),
        function=c.function,
        calls=c.calls,
        output=path_of(c.output, root),
        layers=c.layers,
        points=c.points,
        positions=c.positions,
        force=True,
        folder=root,
        aside=True,
        diagnose=c.diagnose,
    )
    notes = "; ".join(found.seen.notes) if found.seen is not None else "it was killed, or ended by os._exit"
    if found.code:
        raise CannotJudge(f"{command}: it ended with exit code {found.code}")
    if len(found.runs) != 1:
        raise CannotJudge(f"{command}: {notes or f'its calls are {len(found.runs)} runs'}: name the calls of one")
    run = open_program_run(found.runs[0])
    judgement = _judge(c, root, run.folder)
    said = found.seen.runs[0].diagnosis if found.seen is not None else ()
    return Audit(run.folder, judgement, recall_program(run), said or None)


def _judge(c: AuditConfig, root: Path, found: Any) -> Judgement:
    budgets = path_of(c.budgets, root) if c.budgets is not None else None
    baseline = path_of(c.baseline, root) if c.baseline is not None else None
    return gate(found, budgets, baseline, c.across_devices)


def _diagnose(c: AuditConfig, judgement: Judgement, diagnose: Callable[[], Any]) -> Any:
    """Return the diagnosis of a judgement that fails, or why it cannot be made: the verdict stands without it."""
    if not c.diagnose or judgement.exit_code != 1:
        return None
    try:
        return diagnose()
    except PrecauditError as error:
        return str(error)
    except Exception as error:  # the verdict is known and must be told, whatever breaks after it
        return f"diagnose broke off: {type(error).__name__}: {error}"


def _beside(root: Path, name: str, suffix: str = "") -> str:
    """Return a path beside the configuration where there is one, else the name as it is."""
    found = root / name
    return str(found) if found.exists() and name.endswith(suffix) else name


def beside_program(root: Path, reference: str) -> str:
    """Return FILE.py:NAME with the file beside ``root`` where it is there; a module's name as it is."""
    where, _, name = reference.rpartition(":")
    return f"{_beside(root, where, '.py')}:{name}"
