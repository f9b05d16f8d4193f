"""``precaudit rollout``: an engine's log-probabilities against ours and FP64, on the same tokens."""

from pathlib import Path

import click

from precaudit.cli._options import announce, console, progress_bar, say


@click.command()
@click.argument("model")
@click.option("--from", "source", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="JSONL of rollouts: token ids and log-probabilities, ours, vLLM's or SGLang's.")  # fmt: skip
@click.option("--policy", default="bf16", show_default=True, metavar="NAME|FILE", help="Formats of the trainer's view.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="What the engine divided its logits by before it took log-probabilities.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu", "tpu"]), default="auto", show_default=True)
@click.option("--no-fp64", is_flag=True, help="Against the policy alone.")
@click.option("--fail-above", multiple=True, metavar="METRIC=X", help="Exit 1 where a metric is above, as kl=1e-3.")
@click.option("--fail-below", multiple=True, metavar="METRIC=X",
              help="Exit 1 where one is below, as rollout_is_eff_sample_size=0.99.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the records here, as JSONL: of the whole, then of each sequence.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSONL.")
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
def command(
    model: str,
    source: Path,
    policy: str,
    settings: tuple[str, ...],
    temperature: float,
    device: str,
    no_fp64: bool,
    fail_above: tuple[str, ...],
    fail_below: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    allow_field: tuple[str, ...],
) -> int:
    """Hold rollouts made elsewhere to MODEL and FP64.

    Scores their tokens and says how far the engine's log-probabilities are off.

    MODEL: the checkpoint they were made with, named as in trace. Metrics have verl's names (docs/rollouts.md).

    Exit code 0: no limit is broken, or none was given. 1: one is, or a value is NaN, positive or -inf. 3: a limit's
    metric is not defined.
    """
    from precaudit.policies import apply_settings, load_policy, parse_settings
    from precaudit.records import encode
    from precaudit.reports import fitting
    from precaudit.reports import rollouts as report
    from precaudit.rollouts.limits import parse_limits
    from precaudit.rollouts.reading import read_rollouts

    limits = parse_limits(fail_above, fail_below)
    rollouts = read_rollouts(source)
    chosen = apply_settings(load_policy(policy), parse_settings(settings))
    with progress_bar("loading JAX") as advance:
        from precaudit.rollouts.parity import parity
        from precaudit.tracing.subject import load

        found = parity(
            load(model, chosen, device=device, allow=allow_field), rollouts, limits, temperature, not no_fp64, advance
        )  # fmt: skip
    text = b"".join(map(encode, (*found.whole, *found.each))).decode()
    if output is not None:
        from precaudit.cli._judged import write

        write(output, text)
    if as_json:
        click.echo(text, nl=False)
        return found.exit_code
    announce(report.headline(found))
    fitting.show(report.table(found), console())
    fitting.show(report.worst(found), console())
    for line in report.lines(found):
        say(line)
    return found.exit_code
