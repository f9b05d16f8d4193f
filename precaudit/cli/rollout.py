"""``precaudit rollout``: log-probabilities of an engine, or of tokens drawn here, against a trainer's and FP64's."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from precaudit.cli._options import Delivery, deliver, policy_names, progress_bar, report_options

if TYPE_CHECKING:
    from precaudit.checks.rollouts.budgets import RolloutBudget

DRAWS = (
    "prompts",
    "answers",
    "batch",
    "new_tokens",
    "n",
    "top_k",
    "top_p",
    "seed",
    "loops",
    "rounds",
    "trainer_policy",
    "end_tokens",
    "save",
)
OF_A_PROGRAM = ("model", "loops", "rounds", "output", "as_json")


@click.command()
@click.argument("model")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL of rollouts: token ids and log-probabilities, ours, vLLM's or SGLang's.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Without --from: JSONL of prompts to sample from [the shipped ones].",
)
@click.option(
    "--answers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL of questions with answers: how many each policy gets right.",
)
@click.option("--batch", type=int, default=8, show_default=True, help="Sequences sampled together.")
@click.option("--new-tokens", type=int, help="Tokens sampled at most [64; 16 for answers].")
@click.option("--n", type=int, default=1, show_default=True, help="Sequences of every prompt.")
@click.option(
    "--temperature",
    type=float,
    help="0: greedy [1; of one answer each 0]. --from: what the engine divided its logits by.",
)
@click.option("--top-k", type=int, help="Sample from the K most likely tokens.")
@click.option("--top-p", type=float, help="Sample from the fewest tokens of probability P together.")
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of the samples.")
@click.option("--loops", default="while", show_default=True, metavar="python,while", help="Loops to time.")
@click.option("--rounds", type=int, help="How often everything is sampled and timed [3; 1 for answers].")
@click.option(
    "--policy",
    default="bf16",
    show_default=True,
    metavar="A,B",
    help="Formats of the trainer's view and the sampling, names or files; each is timed against the first.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--trainer-policy", metavar="NAME|FILE", help="Score the samples by this policy, too.")
@click.option("--trainer", metavar="MODEL", help="The trainer's checkpoint, where it is another.")
@click.option(
    "--engine-policy",
    metavar="NAME|FILE",
    help="--from: the formats that the engine computes in [--policy; bf16 where that is wider].",
)
@click.option("--end-tokens", metavar="IDS", help="Token ids that end a sequence, or none [the model's].")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu", "tpu"]), default="auto", show_default=True)
@click.option(
    "--mesh",
    metavar="NAME=N[,NAME=N]",
    help="On several devices: prompts over data, heads and widths over model.",
)
@click.option(
    "--explain",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="For the N worst sequences: which operations make the worst token differ, and whether by rounding.",
)
@click.option("--no-fp64", is_flag=True, help="Against policies alone.")
@click.option("--fail-above", multiple=True, metavar="METRIC=X", help="Exit 1 where a metric is above, as kl=1e-3.")
@click.option(
    "--fail-below",
    multiple=True,
    metavar="METRIC=X",
    help="Exit 1 where one is below, as rollout_is_eff_sample_size=.99, answers_difference=0.",
)
@report_options("records", "Write the records here, as JSONL: of the whole, then of each sequence.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the samples, as --from reads them.",
)
@click.option("--allow-field", multiple=True, metavar="NAME", help="A field of config.json to pass over.")
def command(model: str, source: Path | None, to: Delivery, **given: Any) -> int:
    """Compare rollouts with a trainer and FP64.

    Samples tokens from MODEL's prompts, under one policy or several, and says what that costs; or, with --from, reads
    rollouts made elsewhere. Scores their tokens and says how far the log-probabilities differ; with --from, whether
    rounding explains that, and which mistake does if not.

    MODEL: a checkpoint, named as in trace; or a precaudit.Program of your own with steps, FILE.py:NAME, whose loops are
    compared (its code runs; it takes --loops, --rounds, -o and --json alone). Metrics have verl's names
    (docs/rollouts.md).

    Exit code 0: no limit is broken, or none was given. 1: one is, a value is NaN, positive or -inf, an engine differs
    by more than rounding, or the two loops sampled other tokens. 3: a limit's metric is not defined, the interval of
    answers has the limit inside, one of several policies cannot run, or no answer parses.
    """
    from precaudit.checks.rollouts.budgets import parse_limits
    from precaudit.checks.rollouts.limits import ANSWERS
    from precaudit.errors import UserError
    from precaudit.recording.programs.loading import is_reference

    context = click.get_current_context()
    told = [name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if is_reference(model):
        from precaudit.cli._drawing import draw_program

        return draw_program(model, given, to, [name for name in told if name not in OF_A_PROGRAM])
    limits = parse_limits(given["fail_above"], given["fail_below"])
    if to.html is not None:
        from precaudit.reports.charts import drawing

        drawing()
    chosen = [name for name in DRAWS if name in told]
    if given["mesh"] is not None and given["explain"]:
        raise UserError("--explain looks into one device's run; leave out --mesh")
    if source is None:
        if given["engine_policy"] is not None:
            raise UserError("--engine-policy is for rollouts that an engine made: give them with --from FILE")
        from precaudit.cli._drawing import draw_rollouts

        return draw_rollouts(model, given, limits, to)
    if any(x.entry.metric == ANSWERS for x in limits):
        raise UserError(f"--from reads rollouts and asks nothing; leave out --fail-below {ANSWERS}")
    if len(policy_names(given["policy"])) > 1:
        raise UserError(f"--from reads rollouts, which one trainer scores: give one --policy, not {given['policy']}")
    if chosen:
        raise UserError(f"--from reads rollouts and samples none; leave out --{chosen[0].replace('_', '-')}")
    if given["temperature"] is None:
        given["temperature"] = 1.0
    if not given["temperature"] > 0:
        raise UserError(f"--temperature {given['temperature']:g}: what an engine divides by is above 0")
    return _score_file(model, source, given, limits, to)


def _score_file(
    model: str, source: Path, given: dict[str, Any], limits: "tuple[RolloutBudget, ...]", to: Delivery
) -> int:
    """Hold the rollouts of a file to a policy and FP64."""
    from precaudit.checks.rollouts.reading import read_rollouts
    from precaudit.cli._explaining import exit_code_with_causes, explain_rollouts
    from precaudit.errors import UserError
    from precaudit.reports.rollout_report import RolloutStory, rollout_report
    from precaudit.schema.policies import apply_settings, load_policy, parse_settings

    rollouts = read_rollouts(source)
    policy = apply_settings(load_policy(given["policy"]), parse_settings(given["settings"]))
    named = given["engine_policy"]
    if named is not None and given["no_fp64"]:
        raise UserError("--engine-policy judges the engine against FP64; leave out --no-fp64")
    with progress_bar("loading JAX") as advance:
        from precaudit.checks.rollouts.engine import engine_policy
        from precaudit.checks.rollouts.parity import Checks, score_parity
        from precaudit.checks.rollouts.recording import of_read
        from precaudit.recording.tracing.subject import load

        def opened(name: str, policy: Any) -> Any:
            return load(name, policy, device=given["device"], allow=given["allow_field"], mesh=given["mesh"])

        subject = opened(model, policy)
        formats = engine_policy(policy) if named is None else load_policy(named)
        engine = subject if formats == subject.policy else opened(model, formats)
        trainer = None if given["trainer"] is None else opened(given["trainer"], policy)
        checks = Checks(trainer, not given["no_fp64"], limits)
        found = score_parity(subject, rollouts, checks, given["temperature"], advance, engine)
        why = explain_rollouts([(subject, found, rollouts)], given, given["temperature"], advance)
        origin = of_read(found, subject, rollouts, given["temperature"])
    report = rollout_report(RolloutStory(origin, (found,), tuple(why)))
    deliver(report, to)
    return exit_code_with_causes(why, found.exit_code)
