"""The part of ``precaudit trace`` and ``compare`` that keeps sketches in place of tensors."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import Delivery, deliver, leave_out, progress_bar, say
from precaudit.numbers.bytes_text import bytes_text

if TYPE_CHECKING:
    from precaudit.cli.trace import TraceArguments
    from precaudit.schema.policies import Policy
    from precaudit.schema.selection import Selection

NAMES = ("sketch", "stats_only")
OTHERS = ("layers", "positions", "tokens_from", "batch", "pad", "mesh", "resume")  # of no use to a model's sketches


def sketch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --sketch and --stats-only, given to the command as one number, of projections; None: tensors are kept."""

    @wraps(function)
    def command(*args: Any, sketch: int | None, stats_only: bool, **given: Any) -> Any:
        from precaudit.errors import UserError

        if sketch is not None and stats_only:
            raise UserError("give --sketch or --stats-only, not both: --stats-only keeps no projections")
        if sketch is not None:
            from precaudit.interpreters.jaxpr.sketches import check_projections

            check_projections(sketch)
        return function(*args, sketch=0 if stats_only else sketch, **given)

    kept = "Keep no tensors: sums, maxima, hashes of rows and N projections of each, computed in the program."
    for option in (
        click.option("--stats-only", is_flag=True, help="As --sketch, without projections."),
        click.option("--sketch", type=click.IntRange(min=1), metavar="N", help=kept),
    ):
        command = option(command)
    return command


def sketch_of_model(
    context: click.Context,
    asked: "TraceArguments",
    folder: Path,
    prompts: Any,
    select: "Selection",
    policies: "Sequence[Policy]",
) -> int:
    """Run a model over prompts and keep sketches."""
    from precaudit.errors import UserError

    assert asked.subject is not None
    leave_out(context, OTHERS, "--sketch runs prompts of one length together, each whole")
    if len(policies) > 1:
        raise UserError("--sketch and --stats-only take one --policy at a time")
    with progress_bar("loading JAX") as advance:
        from precaudit.recording.programs.sketching import programs_by_length, sketch_programs
        from precaudit.recording.programs.tracing import ProgramTraceOptions
        from precaudit.recording.tracing.subject import load
        from precaudit.recording.tracing.trace import encode_prompts

        model = load(asked.subject, policies[0], device=asked.device, allow=asked.allow_field)
        found = encode_prompts(model, prompts, select, lambda line: say(line, err=True))
        options = ProgramTraceOptions(
            force=asked.force, command=" ".join(["precaudit", *sys.argv[1:]]), sketch=asked.sketch
        )
        programs = programs_by_length(model, found, asked.decode_steps)
        runs = sketch_programs(programs, folder, select, options, advance)
    size = sum(one.record.bytes for one in runs)
    lengths = "one length" if len(runs) == 1 else f"{len(runs)} lengths"
    say(f"{folder}: {len(found)} prompts of {lengths}, {bytes_text(size)}. Next: precaudit compare {folder} RUN")
    return 0


def compare_sketched(run: Path, against: Path, to: Delivery) -> None:
    """Compare two runs of sketches and print what they say."""
    from precaudit.references.comparison.sketches import compare_sketches
    from precaudit.reports.sketches import sketch_report

    deliver(sketch_report(compare_sketches(run, against)), to)
