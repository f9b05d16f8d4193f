"""``precaudit gradcheck``: a kernel and its reference, outputs and gradients, against FP64."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from precaudit.cli._options import Delivery, deliver, options_record, progress_bar, report_options


@dataclass(frozen=True)
class GradcheckOptions:
    """What the command line says of a kernel to check."""

    kernel: str | None
    listing: bool
    reference: str | None
    inputs: str | None
    exact: str | None
    argnums: str | None
    seeds: int
    plain: bool
    failing: Path | None


@click.command()
@click.argument("kernel", required=False)
@click.option("--list", "listing", is_flag=True, help="Name the kernels that ship with a check, and where they run.")
@click.option("--reference", metavar="NAME", help="The plain formula [the module's reference].")
@click.option("--inputs", metavar="NAME|FILE", help="A function of a seed, or a .safetensors file [inputs].")
@click.option("--exact", metavar="NAME", help="The formula on FP64 arrays [the reference, in FP64].")
@click.option("--argnums", metavar="N,N", help="Inputs that are differentiated, or none [ARGNUMS, or all of floats].")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=3, show_default=True, help="Inputs to sample.")
@click.option("--plain", is_flag=True, help="Without the inputs made to fail.")
@click.option(
    "--failing",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Shrink the first input that fails on each side, and write it here.",
)
@report_options("records", "Write the error records here, as JSONL.")
@options_record(GradcheckOptions)
def command(asked: GradcheckOptions, to: Delivery) -> int:
    """Compare a kernel and its gradients with FP64.

    KERNEL: module:NAME or FILE.py:NAME, or the module or file alone (its code is imported); --list names those that
    ship.

    Exit code 0: rounding explains both sides. 1: one is less precise or wrong. 3: it cannot be judged.
    """
    from precaudit.errors import UserError

    if asked.listing:
        return _print_checks(to)
    if asked.kernel is None:
        raise UserError("gradcheck needs a KERNEL, FILE.py:NAME; precaudit gradcheck --list names those that ship")
    from precaudit.checks.gradients.check import gradcheck
    from precaudit.checks.gradients.subjects import import_kernel
    from precaudit.recording.programs.loading import load_function
    from precaudit.reports.gradients import gradient_report

    try:
        argnums = asked.argnums
        places = None if argnums is None else [int(x) for x in argnums.split(",") if argnums != "none"]
    except ValueError:
        raise UserError(f"--argnums {argnums}: numbers of inputs are wanted, such as 0,2, or none") from None
    with progress_bar("loading JAX") as advance:
        it = import_kernel(asked.kernel, asked.reference, asked.inputs, places)
        formula = None if asked.exact is None else load_function(asked.exact)
        found = gradcheck(
            it.kernel,
            it.reference,
            it.inputs,
            argnums=it.argnums,
            exact=formula,
            seeds=asked.seeds,
            hostile=not asked.plain,
            name=it.name,
            advance=advance,
        )
        saved = [] if asked.failing is None else _save_smallest(found, it, formula, asked.failing)
    report = gradient_report(found)
    deliver(replace(report, notes=(*report.notes, *saved)), to)
    return found.exit_code


def _print_checks(to: Delivery) -> int:
    """Print the checks that ship, a table or a line of JSON each."""
    from precaudit.checks.gradients.shipped import shipped_checks
    from precaudit.reports.gradients import shipped_report

    with progress_bar("loading JAX"):
        found = shipped_checks()
    deliver(shipped_report(found), to)
    return 0


def _save_smallest(found: Any, it: Any, exact: Any, folder: Path) -> list[str]:
    """Write the smallest inputs on which each side still fails; return a line for each."""
    from precaudit.checks.gradients.check import gradcheck
    from precaudit.checks.gradients.subjects import write_inputs

    lines = []
    for side in dict.fromkeys(f.side for f in found.found if f.verdict.status in ("fail", "nonfinite")):
        first = next(f for f in found.found if f.side == side and f.verdict.status in ("fail", "nonfinite"))

        def fails(inputs: tuple[Any, ...], side: str = side, array: str = first.array) -> bool:
            again = gradcheck(it.kernel, it.reference, inputs, argnums=it.argnums, exact=exact, hostile=False)
            bad = ("fail", "nonfinite")
            return any(f.side == side and f.array == array and f.verdict.status in bad for f in again.found)

        inputs = found.failing[first.case]
        try:
            from precaudit.checks.gradients.shrinking import shrunk

            inputs = shrunk(inputs, fails)
        except ImportError:
            lines.append("note: without hypothesis inputs are not shrunk: pip install 'precaudit[kernels]'")
        path = folder / f"{side}.safetensors"
        if write_inputs(path, inputs):
            lines.append(f"wrote {path}; Next: precaudit gradcheck {it.name} --inputs {path}")
        else:
            lines.append(f"note: the {side}'s failing inputs are not all arrays and were not written")
    return lines
