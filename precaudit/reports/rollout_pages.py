"""A rollout as Markdown, such as for a pull request, and as one HTML page that needs no network and runs no script."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from precaudit.checks.rollouts.causes import Cause
from precaudit.checks.rollouts.drawn import Drawn
from precaudit.checks.rollouts.limits import ENGINE
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.parity import Parity
from precaudit.numbers.arrays import Array
from precaudit.reports import causes, drawn, markdown, rollout_charts, rollouts, templates
from precaudit.reports.escaping import code
from precaudit.reports.escaping import markdown as escaped
from precaudit.reports.fitting import Table
from precaudit.reports.headline import Headline
from precaudit.reports.html import THEMED
from precaudit.reports.meanings import meaning
from precaudit.schema.policies import load_policy

SHOWN = 50  # rows of a Markdown table; what is more is counted
ROWS = 3000  # of one of a page
WORDS = ("mismatch", *METRICS, "mcnemar", "pass@k", "near tie", "limit", "nonfinite", "unknown", "share", "fp64")


@dataclass(frozen=True)
class Told:
    """What a rollout came to: where it comes from, a Parity for every policy, causes, and what was drawn, if it was."""

    origin: RolloutRun
    parities: tuple[Parity, ...]
    causes: tuple[Cause, ...] = ()
    drawn: Drawn | None = None

    @property
    def headline(self) -> Headline:
        """The first sentence."""
        return rollouts.headline(self.parities[0]) if self.drawn is None else drawn.headline(self.drawn)

    @property
    def notes(self) -> list[str]:
        """What is to be said beside the tables."""
        return list(rollouts.lines(self.parities[0]) if self.drawn is None else drawn.notes(self.drawn))


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, what it shows, tables and sentences."""

    heading: str
    says: str
    tables: tuple[Table, ...] = ()
    sentences: tuple[str, ...] = ()


def sections(t: Told) -> Iterator[Section]:
    """Yield the parts of a page or of Markdown, those without anything left out."""
    if held := [table for p in t.parities if (table := rollouts.held(p)).rows]:
        yield Section("Limits", "", tuple(held))
    if t.drawn is not None:
        yield Section("What drawing takes", "", (drawn.timing(t.drawn),))
    yield Section(
        "Quantiles of |Δ log p|", "Nats; first clipped: the smallest index of a token with ρ outside [0.8, 1.2].",
        (rollouts.quantiles(t.parities),),
    )  # fmt: skip
    yield Section(
        "Mismatch, under verl's names", "First the side that drew, then the one it is held to.",
        tuple(rollouts.table(p) for p in t.parities),
    )  # fmt: skip
    if t.causes:
        yield Section(
            "What explains the worst tokens", "Each operation's share of decode's log p less a trainer's prefill's.",
            (causes.table(t.causes),), tuple(_because(t.causes)),
        )  # fmt: skip
    farthest = [(p, w) for p in t.parities if (w := rollouts.worst(p)).rows]
    if farthest:
        tables = tuple(replace(w, title=f"policy {p.policy}: {w.title}") for p, w in farthest)
        yield Section("Sequences that differ most", "", tables)
    if t.drawn is not None and t.drawn.answers:
        yield Section("Answers", "", (drawn.answers(t.drawn),), tuple(drawn.answered(t.drawn)))


def _because(found: Sequence[Cause]) -> Iterator[str]:
    for cause in found:
        yield from causes.lines([cause], load_policy(cause.policy).settings())


def as_markdown(t: Told) -> str:
    """Return the report as Markdown: the verdict, what it takes, the mismatch, what explains it, answers."""
    out = [f"### precaudit rollout: {code(t.origin.model)}", "", escaped(t.headline.text), ""]
    out += [*(f"- {escaped(line)}" for line in t.notes), ""]
    for s in sections(t):
        out += [f"#### {s.heading}", ""]
        for table in s.tables:
            out += [escaped(table.title), ""] if table.title else []
            out += [*markdown.cut(table, SHOWN, "`precaudit rollout` with `--html FILE` or `-o FILE`"), ""]
        out += [*(f"- {escaped(line)}" for line in s.sentences), *[""][: len(s.sentences)]]
    out += [f"{escaped(name)}: {escaped(told)}  " for name, told in facts(t.origin)]
    return "\n".join(out).rstrip() + "\n"


def as_html(t: Told) -> str:
    """Return the report as one HTML page, whole by itself, its pictures drawn; raises UserError without altair."""
    parts = [
        (s.heading, s.says, [(_cut(x), max(0, len(x.rows) - ROWS)) for x in s.tables], s.sentences)
        for s in sections(t)
    ]  # fmt: skip
    counts = f"{len(t.parities)} {'policy' if len(t.parities) == 1 else 'policies'} on {t.origin.device}"
    made = templates.page("rollouts.html").render(
        title=t.origin.model, subtitle=counts, verdict=t.headline, pictures=list(_pictures(t)), sections=parts,
        notes=t.notes, facts=facts(t.origin), words={w: meaning(w) for w in WORDS if meaning(w)},
        style=templates.text("report.css"), policy=templates.policy(),
    )  # fmt: skip
    return str(made)


def _cut(t: Table) -> Table:
    return replace(t, rows=t.rows[:ROWS])


def _pictures(t: Told) -> Iterator[tuple[str, str]]:
    """Yield (title, SVG) of where |Δ log p| lies and how it drifts, where a token is judged."""
    apart = lines_of(t.parities)
    for title, chart in (
        ("Share of tokens that are farther apart", rollout_charts.distribution),
        ("Mean over positions of the sequence", rollout_charts.drift),
    ):
        if any((abs(x) > 0).any() for x in apart.values()):
            yield title, rollout_charts.svg(chart(apart, THEMED))


def lines_of(parities: Sequence[Parity]) -> dict[str, Array]:
    """Return {name: Δ log p [sequences, tokens]}: of one policy a line a pair, of several the engine's last a policy.

    The engine's last is the pair that the worst sequences are of: against FP64 where that was asked for.
    """
    if len(parities) == 1:
        p = parities[0]
        return {f"{r.rollout} / {r.trainer}": p.apart(r.rollout, r.trainer) for r in p.whole}
    lasts = [(p, next(r for r in reversed(p.whole) if r.rollout == ENGINE)) for p in parities]
    return {f"{p.policy}: {r.rollout} / {r.trainer}": p.apart(r.rollout, r.trainer) for p, r in lasts}


def facts(run: RolloutRun) -> list[tuple[str, str]]:
    """Return what was run, as (name, value)."""
    trainer = [("trainer", run.trainer["name"])] if run.trainer else []
    return [
        ("model", f"{run.model}, weights {run.weights[:12]}…"), ("policies", ", ".join(run.policies)), *trainer,
        *((name.replace("_", " "), told) for name, told in run.asked.items()), ("device", run.device),
        *run.versions.items(),
    ]  # fmt: skip
