"""``precaudit trace``: run a model with taps and record what they see."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._hosts import NAMES, hosts_options
from precaudit.cli._options import (
    deliver,
    filter_options,
    given_options,
    leave_out,
    options_record,
    policy_names,
    progress_bar,
    say,
)
from precaudit.cli._sketching import NAMES as SKETCHED
from precaudit.cli._sketching import sketch_of_model, sketch_options
from precaudit.numbers.bytes_text import bytes_text

if TYPE_CHECKING:
    from precaudit.schema.policies import Policy
    from precaudit.schema.selection import Filters


@dataclass(frozen=True)
class TraceArguments:
    """What the command line says of a subject to record, its filters aside."""

    subject: str | None
    output: Path | None
    prompts: Path | None
    text: str | None
    policy: str
    settings: tuple[str, ...]
    decode_steps: int
    tokens_from: Path | None
    batch: int | None
    pad: str
    device: str
    mesh: str | None
    allow_field: tuple[str, ...]
    rename: Path | None
    strict: bool
    taps: str
    repeat: Path | None
    force: bool
    resume: bool
    sketch: int | None


@click.command()
@click.argument("subject", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the run [traces/runs/SUBJECT-POLICY].")
@filter_options()
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL of prompts [the shipped ones].")
@click.option("--text", help="One prompt, instead of a file.")
@click.option(
    "--policy",
    default="bf16",
    show_default=True,
    metavar="A,B",
    help="Formats of the computation, names or files; of several, a run of each in the folder -o.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--decode-steps", type=int, default=8, show_default=True, help="Steps after decode0.")
@click.option("--tokens-from", type=click.Path(path_type=Path), metavar="RUN", help="Feed another run's tokens.")
@click.option("--batch", type=int, help="Prompts run together [1, or as many as the axis data of --mesh].")
@click.option("--pad", type=click.Choice(["left", "right"]), default="right", show_default=True)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|gpu|tpu",
    help="What runs the model; tpu-predicted:v5e, tpu-emulated:v5e: a TPU that is not here.",
)
@click.option(
    "--mesh",
    metavar="NAME=N[,NAME=N]",
    help="Of a model: cut over devices, prompts over data, heads and widths over model.",
)
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over; recorded.")
@click.option(
    "--rename",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Of a program: TOML of other names for its points, q = "query_proj~1".',
)
@click.option(
    "--strict", is_flag=True, help="Of a program: compile it without excess precision, and say what that changes."
)
@click.option(
    "--taps",
    type=click.Choice(["own", "automatic", "both"]),
    default="both",
    show_default=True,
    help="Of a program: its checkpoint_name taps alone, automatic points alone, or both.",
)
@click.option("--repeat", type=click.Path(path_type=Path), metavar="RUN", help="Record RUN again, in place of SUBJECT.")
@sketch_options
@hosts_options
@click.option("--force", is_flag=True, help="Replace a run that is there.")
@click.option("--resume", is_flag=True, help="Go on with a run that was cut off, given otherwise as it was.")
@click.pass_context
@options_record(TraceArguments)
def command(context: click.Context, asked: TraceArguments, filters: "Filters") -> int:
    """Run SUBJECT and record it.

    SUBJECT is tiny, smollm2, a Hugging Face folder or hub id, a .gguf file, a folder with an Orbax checkpoint, or a
    precaudit.Program of your own as FILE.py:NAME or module:NAME. Its code runs; it takes only -o, --layers, --points,
    --prompt (its cases), --phases (its entry points), --positions (calls of one, one after another), --policy and --set
    (what it announces), --rename, --strict, --taps, --force, --resume and --device tpu-predicted. With --repeat:
    record RUN once more and say whether every tensor came out the same, bit for bit (exit code 1 where one did not).
    With several policies, exit code 3 where one of them cannot run.
    """
    if asked.repeat is not None:
        return _again(context, asked.repeat, asked.output, asked.force)
    from precaudit.errors import UserError
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings
    from precaudit.schema.program_names import require_name
    from precaudit.schema.prompts import Prompt
    from precaudit.schema.selection import Selection

    subject, text = asked.subject, asked.text
    if subject is None:
        raise UserError("SUBJECT is missing: tiny, smollm2, a Hugging Face folder, a .gguf file, or FILE.py:NAME")
    from precaudit.recording.programs.loading import is_reference

    if is_reference(subject):
        return _program(context, subject, filters, asked.sketch)
    if asked.rename is not None or asked.taps != "both":
        raise UserError(f"{'--rename' if asked.rename else '--taps'} is for a program, FILE.py:NAME")
    if asked.strict:
        raise UserError("--strict is for a program, FILE.py:NAME; of a model it is --set excess_precision=off")
    require_name(subject)
    select = Selection.parse(filters.layers, filters.points, filters.phases, filters.positions, filters.prompt)
    changes = parse_settings(asked.settings)
    chosen = [apply_settings(load_policy(name), changes) for name in policy_names(asked.policy)]
    if text is not None and asked.prompts is not None:
        raise UserError("give --text or --prompts, not both")
    if text is not None and not text.strip():
        raise UserError("--text is empty")
    name = chosen[0].name if len(chosen) == 1 else "policies"
    folder = asked.output or Path("traces") / "runs" / f"{Path(subject).stem}-{name}"
    source = [Prompt(id="text", prompt=text)] if text is not None else asked.prompts
    if asked.sketch is not None:
        return sketch_of_model(context, asked, folder, source, select, chosen)
    with (
        progress_bar("loading JAX") as advance,
        _on_interrupt([folder] if len(chosen) == 1 else _folders(chosen, folder)),
    ):
        from precaudit.progress import Progress
        from precaudit.recording.tracing.subject import load
        from precaudit.recording.tracing.trace import TraceOptions, trace

        command = " ".join(["precaudit", *sys.argv[1:]])
        options = TraceOptions(
            asked.decode_steps, asked.batch, asked.pad, asked.tokens_from, asked.force, command, asked.resume
        )
        progress = Progress(lambda line: say(line, err=True), advance)

        def open_subject(policy: "Policy") -> Any:
            return load(subject, policy, device=asked.device, allow=asked.allow_field, mesh=asked.mesh)

        if len(chosen) == 1:
            runs = [trace(open_subject(chosen[0]), folder, source, select, options, progress)]
        else:
            from precaudit.workflows.several import PolicySubjects, trace_policies

            subjects = PolicySubjects(chosen, open_subject)
            found = trace_policies(subjects, folder, source, select, options, progress)
            runs = [t.run for t in found if t.run is not None]
    for run in runs:
        _warn(run)
    if len(chosen) > 1:
        _deliver_recorded(found)
        say(f"Next: precaudit compare {folder}")
        return 0 if len(runs) == len(found) else 3
    say(f"{folder}: {len(run.points)} tensors, {bytes_text(run.record.bytes)}. Next: precaudit compare {folder}")
    return 0


def _folders(policies: "Sequence[Policy]", folder: Path) -> list[Path]:
    from precaudit.workflows.several import folders_of

    return folders_of(policies, folder)


@contextmanager
def _on_interrupt(folders: Sequence[Path]) -> Iterator[None]:
    """Where Ctrl-C ends a trace, say what is there and how to go on."""
    from precaudit.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        from precaudit.recording.programs.resuming import cut_off
        from precaudit.recording.runs.kinds import kind_of
        from precaudit.recording.runs.unfinished import finished_prompts

        begun = [(f, n) for f in folders if (n := finished_prompts(f) or cut_off(f)) is not None]
        finished = sum(kind_of(f) is not None for f in folders) - len(begun)
        if not begun and (len(folders) == 1 or not finished):
            raise
        words = [w for w in sys.argv[1:] if w not in ("--resume", "--force")]
        kinds = {f: "cases" if kind_of(f) == "program" else "prompts" for f in folders}
        there = "; ".join(f"{f} holds {whole} of {every} {kinds[f]}" for f, (whole, every) in begun)
        there = there or f"{finished} of {len(folders)} runs are finished"
        raise Interrupted(f"interrupted; {there}. Next: precaudit {shlex.join([*words, '--resume'])}") from None


def _warn(run: Any) -> None:
    """Say where capturing changed what the program computes."""
    from precaudit.schema.digits import digits

    for n in run.record.neutrality:
        if not n.bitwise:
            say(f"warning: recording changed the {n.phase} logits by up to {digits(n.max_diff, 2)}", err=True)


def _deliver_recorded(found: Sequence[Any]) -> None:
    """Print what became of every policy."""
    from precaudit.reports.policies import policy_table
    from precaudit.reports.report import Report, Section

    rows = [
        (t.policy, t.folder.name, f"{len(t.run.points):,}", f"{t.run.record.bytes / 1e6:,.1f}", "recorded")
        if t.run is not None
        else (t.policy, "", "", "", t.why)
        for t in found
    ]
    table = policy_table(("policy", "run", "tensors", "MB", "what became of it"), rows)
    deliver(Report(None, (Section(tables=(table,)),)))


def _program(context: click.Context, reference: str, filters: "Filters", sketch: int | None) -> int:
    """Record a program of the user's."""
    from precaudit.recording.programs.loading import load_program, rename_points, trust
    from precaudit.recording.programs.planning import ProgramSelection, longest_scan
    from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
    from precaudit.recording.runs.programs import points_text
    from precaudit.recording.tracing.predicting import program_target
    from precaudit.schema.digits import count_text, digits
    from precaudit.schema.policies import parse_settings
    from precaudit.schema.selection import names_in, parse_layers

    given = context.params
    device, strict, rename, force = given["device"], given["strict"], given["rename"], given["force"]
    layers, points, phases, cases = filters.layers, filters.points, filters.phases, filters.prompt
    target = program_target(device, strict)
    itself = {
        "subject",
        "output",
        "rename",
        "layers",
        "points",
        "prompt",
        "phases",
        "positions",
        "force",
        "resume",
        "strict",
    }
    itself |= {*NAMES, *SKETCHED, "taps", "policy", "settings", *({"device"} if target else ())}
    other = [name for name in given_options(context) if name not in itself]
    leave_out(context, other, "a program says itself what it runs on")
    program = load_program(reference) if rename is None else rename_points(load_program(reference), rename)
    program = program if cases is None else program.some(names_in(cases, "case"))
    if (policy := _from_command_line(context, "policy")) is not None or context.params["settings"]:
        program = program.announcing(policy, parse_settings(context.params["settings"]))
    folder = given["output"] or Path("traces") / "runs" / reference.rpartition(":")[2]
    with progress_bar("loading the program") as advance, _on_interrupt([folder]):
        taps = context.params["taps"]
        chosen = None if layers is None else parse_layers(layers, longest_scan(program, taps))
        called = " ".join(["precaudit", *sys.argv[1:]])
        asked = None if points is None else names_in(points, "point")
        asked = None if asked is None or "all" in asked else asked
        entries = None if phases is None else names_in(phases, "entry point")
        select = ProgramSelection(chosen, asked, entries, filters.positions, taps)
        options = ProgramTraceOptions(reference, force, called, target, strict, context.params["resume"], sketch)
        trust(reference)  # its code has run
        run = trace_program(program, folder, select, options, advance)
    for n in (n for one in run.entries for n in one.record.neutrality):
        if not n.bitwise:
            say(f"warning: taps changed the outputs of {n.case} by up to {digits(n.max_diff, 2)}", err=True)
    r = run.record
    if strict:
        say(f"note: {r.warnings[0]}")
    elif any(p.dtype in ("bfloat16", "float16") for p in r.points) and target is None:
        say("note: the compiler may leave out roundings that the program declares (--strict: with all of them)")
    points = count_text(len(r.judged_points), f"{points_text(r)} point")
    say(
        f"{folder}: {points}, {count_text(len(r.cases), 'case')} of "
        f"{r.every_calls}, {bytes_text(r.bytes)}. Next: precaudit compare {folder}{'' if sketch is None else ' RUN'}"
    )
    return 0


def _from_command_line(context: click.Context, name: str) -> str | None:
    """Return an option's value where the command line says it."""
    from click.core import ParameterSource

    said = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
    return str(context.params[name]) if said else None


def _again(context: click.Context, run: Path, output: Path | None, force: bool) -> int:
    """Repeat a run and print whether it came out the same."""
    other = [name for name in given_options(context) if name not in ("repeat", "output", "force", *NAMES)]
    leave_out(context, other, "--repeat records what RUN says")
    from precaudit.errors import UserError
    from precaudit.mirrors import mirror_of
    from precaudit.progress import Progress
    from precaudit.workflows.repeat import repeat

    if output is None and mirror_of(run) is not None:
        raise UserError(f"{run} is in a bucket: say with -o where its repetition goes")
    folder = output or run.resolve().with_name(f"{run.resolve().name}-repeat")
    with progress_bar("loading JAX") as advance:
        found = repeat(run, folder, None, force, Progress(lambda line: say(line, err=True), advance))
    if found.where is None:
        say(f"{folder}: all {found.tensors} tensors are bit-identical with {run}")
        return 0
    differ = f"{found.differing} of {found.tensors} tensors differ from {run}, first {found.where}"
    say(f"{folder}: {differ}. Next: precaudit compare {folder} {run}")
    return 1
