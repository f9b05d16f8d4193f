"""``precaudit probe``: products of attention scores in every format and way, on the device that runs."""

from dataclasses import dataclass

import click

from precaudit.cli._options import Delivery, deliver, options_record, progress_bar, report_options


@dataclass(frozen=True)
class ProbeOptions:
    """What the command line asks of a device."""

    shapes: tuple[str, ...]
    formats: str
    device: str
    tpu: str | None
    fail_on: tuple[str, ...]
    no_time: bool
    verbose: bool


@click.command()
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="B,H,Q,DxS",
    help="Queries [B, H, Q, D] by keys [B, H, S, D]; may be repeated [decode, prefill].",
)
@click.option(
    "--formats",
    default="bfloat16,float16,float32,int8",
    show_default=True,
    metavar="NAMES",
    help="Formats of the operands.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu", "tpu"]), default="auto", show_default=True)
@click.option(
    "--tpu", metavar="v5e:2x2", help="Also what this TPU's compiler would do; needs the extra tpu, and no TPU."
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="TEXT",
    help="Exit 1 where it is so: 'default worse than 1e-3', 'BF16_* replaced'; may be repeated.",
)
@click.option("--no-time", is_flag=True, help="Without seconds: numbers that are the same in every run.")
@click.option("-v", "--verbose", is_flag=True, help="A row a way, the refused ones among them.")
@report_options("records", "Write the records here, as JSONL; gate judges them.")
@options_record(ProbeOptions)
def command(asked: ProbeOptions, to: Delivery) -> int:
    """Say how this device computes attention scores.

    It multiplies queries by keys, in every format of operands and every precision and preset that JAX has. It
    prints the format of the scores, their error from FP64, the arithmetic, whether that was asked for, seconds and
    bytes.

    Exit code 0: every --fail-on holds, or none was given. 1: one does not. 3: one cannot be judged.
    """
    with progress_bar("loading JAX") as advance:
        from precaudit.checks.probing.probe import probe

        found = probe(
            asked.shapes,
            asked.formats,
            tpu=asked.tpu,
            device=asked.device,
            fail_on=asked.fail_on,
            timed=not asked.no_time,
            advance=advance,
        )
    from precaudit.reports.probe import probe_report

    deliver(probe_report(found, asked.verbose), to)
    return found.exit_code
