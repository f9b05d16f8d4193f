"""``precaudit sweep``: the same prompts under many policies, and what each costs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import (
    Delivery,
    cache_option,
    deliver,
    filter_options,
    progress_bar,
    references,
    report_options,
    say,
)

if TYPE_CHECKING:
    from precaudit.schema.policies import Policy
    from precaudit.schema.selection import Filters


@click.command()
@click.argument("subject")
@click.option("--policy", metavar="A,B", help="Names or files [the shipped ones]; times are × the first's.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL of prompts [the shipped ones].")
@click.option("--text", help="One prompt.")
@filter_options()
@click.option("--decode-steps", type=int, default=4, show_default=True, help="Steps recorded after each prompt.")
@click.option("--batch", type=int, default=8, show_default=True, help="Sequences sampled together.")
@click.option(
    "--new-tokens", type=int, default=16, show_default=True, help="Tokens sampled and timed after each prompt."
)
@click.option("--rounds", type=int, default=3, show_default=True, help="How often everything is sampled and timed.")
@click.option("--tpu", metavar="v5e", help="Predict every policy's error on a TPU that need not be here, too.")
@click.option(
    "--plot",
    "plots",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write KL against time as .html or .png; repeatable.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Where the runs go.")
@click.option("--force", is_flag=True, help="Replace runs that are there.")
@click.option("--resume", is_flag=True, help="Go on with a sweep that was cut off.")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu", "tpu"]))
@click.option(
    "--mesh",
    metavar="NAME=N[,NAME=N]",
    help="On several devices: prompts over data, heads and widths over model.",
)
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
@cache_option
@report_options("rows")
def command(subject: str, text: str | None, filters: "Filters", to: Delivery, **given: Any) -> int:
    """Run SUBJECT under many policies and say what each costs.

    Every policy is traced on the tokens of the first, compared with FP64 and judged. All sample tokens after the same
    prompts, interleaved, and are timed. A row is a policy; the front is what nothing beats in both KL and time.

    Exit code 1 where a policy fails, 3 where one cannot run or be judged.
    """
    from precaudit.errors import UserError
    from precaudit.reports import sweep as report
    from precaudit.schema.meshes import ONE, parse_mesh
    from precaudit.schema.policies import load_policy
    from precaudit.schema.program_names import require_name
    from precaudit.schema.prompts import Prompt
    from precaudit.schema.selection import Selection
    from precaudit.workflows.sweep import Sweep, policies_of, sweep
    from precaudit.writing import write_whole

    if text is not None and given["prompts"] is not None:
        raise UserError("give --text or --prompts, not both")
    for path in given["plots"]:
        if path.suffix not in (".html", ".png"):
            raise UserError(f"--plot {path}: a plot is written as .html or .png")
    if given["plots"]:
        from precaudit.reports.charts import drawing

        drawing()
    require_name(subject)
    mesh = ONE if given["mesh"] is None else parse_mesh(given["mesh"])
    policies = [load_policy(name) for name in policies_of(given["policy"])]
    select = Selection.parse(filters.layers, filters.points, filters.phases, filters.positions, filters.prompt)
    source = [Prompt(id="text", prompt=text)] if text is not None else given["prompts"]
    folder = given["output"] or Path("traces") / "runs" / f"{Path(subject).stem}-sweep"
    with progress_bar("loading JAX") as advance, references(given["no_cache"]) as cache:
        from precaudit.checks.rollouts.sampling import Sampling
        from precaudit.checks.rollouts.timing import How
        from precaudit.progress import Progress
        from precaudit.recording.tracing.subject import load
        from precaudit.recording.tracing.trace import TraceOptions
        from precaudit.references.comparison.compare import CompareOptions as CompareOptions

        def open_subject(policy: "Policy", device: str) -> Any:
            where = device or given["device"]
            return load(subject, policy, device=where, allow=given["allow_field"], mesh=mesh)

        steps, line = given["decode_steps"], " ".join(["precaudit", *sys.argv[1:]])
        asked = Sweep(
            policies,
            source,
            select,
            TraceOptions(steps, given["batch"], "right", None, given["force"], line, given["resume"]),
            CompareOptions(accum=(), cache=cache),
            How(given["batch"], given["new_tokens"], Sampling(1.0, None, None, 0), (), given["rounds"]),
            given["tpu"],
            mesh,
        )
        rows = sweep(open_subject, asked, folder, Progress(lambda line: say(line, err=True), advance))
    for path in given["plots"]:
        write_whole(path, report.picture(rows, path, subject, given["tpu"]))
    found = report.sweep_report(rows, given["tpu"])
    deliver(found, to)
    return found.exit_code
