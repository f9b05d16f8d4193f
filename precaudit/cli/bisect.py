"""``precaudit bisect``: which change between a good A and a bad B breaks a test."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import Delivery, cache_option, deliver, progress_bar, references, report_options, say

if TYPE_CHECKING:
    from precaudit.diagnosis.bisection.records import BisectionTrial
    from precaudit.reports.report import Report

WAYS = ("policy", "layers", "lines", "flags", "passes", "commits", "versions", "programs")


@click.command()
@click.argument("subject")
@click.option("--good", metavar="A", help="What passes the test: a policy, flags, a commit, jax==0.10.2.")
@click.option("--bad", metavar="B", help="What does not.")
@click.option("--by", required=True, type=click.Choice(WAYS), help="What changes between A and B.")
@click.option("--test", metavar="TEST", help="kl<1e-3, flips=0, logits<1e-2, forward@attn_out<2x, bits, verdict.")
@click.option("--test-command", "test_command", metavar="CMD", help="A command: exit 0 good, 1 bad, 125 cannot decide.")
@click.option(
    "--find",
    type=click.Choice(["cause", "cure"]),
    help="The smallest set that breaks A, or that mends B [layers: cure, else cause].",
)
@click.option("--raise", "raised", metavar="float32", help="By layers: what their arithmetic is raised to.")
@click.option("--between", metavar="V,V", help="By versions: those between A and B, oldest first.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    help="Compare N steps of a training in A and in B, and search nothing.",
)
@click.option(
    "--members",
    type=click.IntRange(4),
    default=8,
    show_default=True,
    metavar="N",
    help="By --steps: correct ways to compute A's steps that B is compared with.",
)
@click.option("--policy", metavar="NAME|FILE", help="By flags, commits, versions: the policy of a model [bf16].")
@click.option("--against", type=click.Choice(["fp64", "good"]), help="What errors are from: FP64, or A's run.")
@click.option(
    "--most",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    metavar="N",
    help="Trials that may be added to prove a set the smallest.",
)
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Trials that are made at once."
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="By policy: the cluster that makes trials, tcp://HOST:PORT of a dask scheduler; it is trusted ([cluster]).",
)
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL of prompts [the shipped ones].")
@click.option("--text", help="One prompt.")
@click.option("--prompt", metavar="ID[,ID]", help="Some of the prompts.")
@click.option("--points", metavar="POINTS", help="Points to record [logits, and what the test names].")
@click.option(
    "--decode-steps", type=click.IntRange(0), default=4, show_default=True, help="Steps recorded after each prompt."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Where trials go.")
@click.option("--force", is_flag=True, help="Replace a bisection that is there.")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu", "tpu"]))
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
@cache_option
@report_options("answer and the trials")
def command(subject: str, to: Delivery, **given: Any) -> int:
    """Find which changes between A and B break a test.

    A passes the test and B does not. Each trial is A with some of B's changes. The answer is a smallest set, proved so,
    or one that is only 1-minimal, found by delta debugging. Every trial is kept: the same command goes on where a
    bisection was cut off.

    Exit code 0 where it was found, 2 where A fails or B passes, 3 where that cannot be decided or a trial answers
    differently twice.

    With --steps nothing is searched: a training runs the same steps in A and in B from one state. Exit code 0 where
    they differ as rounding does, 1 where B drifts, 3 where that cannot be decided.
    """
    from precaudit.errors import UserError

    steps, members = given.pop("steps"), given.pop("members")
    folder = given["output"] or Path("traces") / "runs" / f"{Path(subject.partition(':')[0]).stem}-bisect"
    names = ("no_cache", "output")
    options = {k: v for k, v in given.items() if k not in names}
    if steps is not None:
        report = _training(subject, folder, options, steps, members)
        deliver(report, to)
        return report.exit_code
    if given["by"] == "programs":
        raise UserError("--by programs compares two trainings: give --steps N")
    if (given["test"] is None) == (given["test_command"] is None):
        raise UserError("give --test TEST or --test-command CMD, one of them")
    with progress_bar("loading JAX") as advance, references(given["no_cache"]) as cache:
        from precaudit.diagnosis.bisection.trials import TRIALS, read_trials
        from precaudit.progress import Progress
        from precaudit.reports.bisect import bisect_report, state_text
        from precaudit.workflows.bisect import bisect, figure_text
        from precaudit.workflows.bisect_sources import Given, source_of

        asked = Given(subject, folder, **options)
        request, source = source_of(asked, Progress(lambda _line: None, advance), cache, " ".join(sys.argv[1:]))

        def tell(trial: "BisectionTrial") -> None:
            changes = state_text(request.find, source.changes, trial.changes)
            why = "" if trial.why is None else f": {trial.why}"
            say(f"{changes}: {trial.answer}{figure_text(request.criterion.name, trial)}{why}", err=True)

        found = bisect(request, source, folder, tell)
        trials = read_trials(folder / TRIALS)[1:]
    report = bisect_report(found, trials, str(folder))
    deliver(report, to)
    return report.exit_code


def _training(subject: str, folder: Path, options: dict[str, Any], steps: int, members: int) -> "Report":
    """Return the report of a training's steps in A and in B."""
    with progress_bar("loading JAX") as advance:
        from precaudit.progress import Progress
        from precaudit.reports.training import training_report
        from precaudit.workflows.bisect_sources import Given
        from precaudit.workflows.training import compare_training

        asked = Given(subject, folder, **options)
        found, records = compare_training(asked, steps, members, Progress(lambda _line: None, advance))
    return training_report(found, records, str(folder))
