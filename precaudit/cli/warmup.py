"""``precaudit warmup``: compile beforehand what a rollout or a trace runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precaudit.cli._options import Delivery, deliver, options_record, policy_names, progress_bar, report_options, say

if TYPE_CHECKING:
    from precaudit.checks.rollouts.timing import Task
    from precaudit.checks.rollouts.warmup import Warmed
    from precaudit.recording.tracing.subject import Subject


@dataclass(frozen=True)
class WarmupOptions:
    """What the command line says will run later."""

    model: str
    purpose: str
    prompts: Path | None
    lengths: str | None
    batch: int
    new_tokens: int
    n: int
    temperature: float
    top_k: int | None
    top_p: float | None
    loops: str
    decode_steps: int
    policy: str
    settings: tuple[str, ...]
    device: str
    mesh: str | None
    allow_field: tuple[str, ...]


@click.command()
@click.argument("model")
@click.option("--for", "purpose", type=click.Choice(["rollout", "trace", "both"]), default="rollout", show_default=True)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL of prompts, whose lengths count [the shipped ones].",
)
@click.option("--lengths", metavar="N,N", help="Lengths of prompts in tokens, in place of a file.")
@click.option("--batch", type=int, default=8, show_default=True, help="Sequences sampled together; for trace, prompts.")
@click.option("--new-tokens", type=int, default=64, show_default=True, help="Tokens sampled at most.")
@click.option("--n", type=int, default=1, show_default=True, help="Sequences of every prompt.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, help="As in rollout.")
@click.option("--top-p", type=float, help="As in rollout.")
@click.option("--loops", default="while", show_default=True, metavar="python,while", help="Loops to compile.")
@click.option("--decode-steps", type=int, default=8, show_default=True, help="Of trace: steps after decode0.")
@click.option("--policy", default="bf16", show_default=True, metavar="A,B", help="Names or files.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu", "tpu"]), default="auto", show_default=True)
@click.option(
    "--mesh",
    metavar="NAME=N[,NAME=N]",
    help="On several devices: prompts over data, heads and widths over model.",
)
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
@report_options("programs")
@options_record(WarmupOptions)
def command(asked: WarmupOptions, to: Delivery) -> int:
    """Compile what MODEL's rollouts or traces run.

    `precaudit doctor` says where programs are kept. A later run of the same shapes reads them there. Shapes are
    those of buckets: 64, 256, then steps of an eighth. For trace, with the default points.
    """
    from precaudit.checks.rollouts.sampling import Sampling
    from precaudit.cli._drawing import loops_named
    from precaudit.errors import UserError
    from precaudit.reports.drawn import warmup_report
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings

    if asked.prompts is not None and asked.lengths is not None:
        raise UserError("give --prompts or --lengths, not both")
    changes = parse_settings(asked.settings)
    chosen = [apply_settings(load_policy(name), changes) for name in policy_names(asked.policy)]
    sampling, named = Sampling(asked.temperature, asked.top_k, asked.top_p), loops_named(asked.loops)
    with progress_bar("loading JAX") as advance:
        from precaudit.checks.rollouts.timing import How, check_room
        from precaudit.checks.rollouts.warmup import for_rollouts, for_traces
        from precaudit.models.checkpoints.ends import end_tokens
        from precaudit.recording.tracing.subject import load

        found: list[Warmed] = []
        for i, one in enumerate(chosen):
            advance(i, len(chosen), f"compiling for {one.name}")
            subject = load(asked.model, one, device=asked.device, allow=asked.allow_field, mesh=asked.mesh)
            how = How(asked.batch, asked.new_tokens, sampling, end_tokens(subject.checkpoint))
            given = _tasks(subject, asked.prompts, asked.lengths, asked.n)
            check_room(subject, given, how)
            if asked.purpose != "trace":
                found += for_rollouts(subject, given, how, named)
            if asked.purpose != "rollout":
                found += for_traces(subject, given, asked.decode_steps, asked.batch)
    deliver(warmup_report(found), to)
    return 0


def _tasks(subject: "Subject", prompts: Path | None, lengths: str | None, n: int) -> "list[Task]":
    """Return sequences of the lengths that were asked for."""
    from precaudit.checks.rollouts.timing import tasks
    from precaudit.errors import UserError
    from precaudit.recording.tracing.trace import encode_prompts
    from precaudit.schema.selection import Selection

    if lengths is None:
        found = encode_prompts(subject, prompts, Selection(), lambda line: say(line, err=True))
        return tasks([(p.id, p.tokens) for p in found], n)
    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise UserError(f"--lengths {lengths}: numbers of tokens are wanted, such as 40,500") from None
    return tasks([(str(i), (0,) * max(size, 0)) for i, size in enumerate(sizes)], n)
