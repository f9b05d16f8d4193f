"""Whatever counts verdicts shows the gate's numbers, ``input suspect`` included: 12 runs, on every screen."""

import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from junitparser import JUnitXml
from rich.console import Console

from precaudit import compare as compare_any
from precaudit import import_dump
from precaudit.cli import run as cli
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder.parts import Parts, attention_scores
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.tracing.subject import load as load_model
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.programs import compare_program
from precaudit.reports.annotations import SHOWN, SILENT, annotations
from precaudit.reports.cards import card_text
from precaudit.reports.cells import MAP_OF, map_cells
from precaudit.reports.comparison import recalled_report
from precaudit.reports.gate import gate_report
from precaudit.reports.gathered import gather_run, recall_run
from precaudit.reports.junit import render_junit
from precaudit.reports.pages import as_html, as_json, as_markdown
from precaudit.reports.policies import COLUMNS as COLUMNS_OF_POLICIES
from precaudit.reports.policies import policies_report, row_of
from precaudit.reports.program import COLUMNS
from precaudit.reports.session.filters import Filters
from precaudit.reports.session.reading import read_run
from precaudit.reports.sketches import sketch_report
from precaudit.reports.summary import local_sentence
from precaudit.reports.terminal import print_report
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from precaudit.workflows.several import PolicySubjects, compare_policies, trace_policies
from tests.helpers import padded_batches
from tests.helpers.other_decoder import MAP, MODEL, fixture_tokens, write_dump
from tests.helpers.paths import ROOT
from tests.helpers.runs import altered, record
from tests.helpers.selected import few

STATUSES = "fail|nonfinite|missing|stale|unknown|input suspect|not run|pass"
COUNT = re.compile(rf"(\d[\d,]*) ({STATUSES})\b")
SUCH = re.compile(r"\((\d+) such")


def counted(text):
    """How many have each status, as a text says."""
    return Counter({status: int(n.replace(",", "")) for n, status in COUNT.findall(text)})


def open_ones(counts):
    return Counter({s: n for s, n in counts.items() if s != "pass" and n})


# The runs


def layers(params, x):
    def layer(x, w):
        return x + jnp.tanh(x) @ w, None

    x, _ = jax.lax.scan(layer, x, params["mlp"])
    return x @ params["mlp"][0]


WEIGHTS = {"mlp": jax.random.normal(jax.random.key(0), (3, 8, 8), jnp.bfloat16)}
PROGRAM = Program(layers, WEIGHTS, {"a": (jnp.ones((4, 8), jnp.bfloat16),)}, outputs="y")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return trace_program(PROGRAM, tmp_path_factory.mktemp("own") / "run")


def recompared(own, folder, change=None):
    """The program's run, or one whose value in the second step is changed, compared."""
    compare_program(own if change is None else altered(own, folder, "layer", change), PROGRAM)
    return own.folder if change is None else folder


def wrong(x):
    x[1] = (x[1].astype(np.float32) * 1.5).astype(x.dtype)
    return x


def not_finite(x):
    x[1].reshape(-1)[3] = np.nan
    return x


def doubled(q, k, scale, a):
    return attention_scores(q, k, scale * 2, a)


def model(folder, policy="bf16", points="all,logits:all", **parts):
    select = Selection.parse(layers="0:2", points=points)
    record(folder / "run", policy=policy, parts=replace(Parts(), **parts), select=select, decode_steps=1)
    compare(folder / "run", options=CompareOptions(accum=()))
    return folder / "run"


def padded(folder, program):
    compare_program(trace_program(program, folder), program)
    return folder


def dumped(folder, **how):
    path = write_dump(folder / "dump", {"a": fixture_tokens(), "b": fixture_tokens()[:40]}, names=MAP, **how)
    found = import_dump(folder / "dump", folder / "theirs", path).folder
    compare_any(found, model=str(MODEL))
    return found


def meshed(folder, name):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([sys.executable, "-m", "tests.helpers.meshed_runs", folder, name], cwd=ROOT, env=flags, check=True)
    compare_any(folder / name)
    return folder / name


def predicted(folder):
    asked = ["tiny", "--device", "tpu-predicted:v5e", "--policy", "bf16", "--layers", "0", "-o", str(folder)]
    assert cli(["trace", *asked]) == 0
    assert cli(["compare", str(folder)]) == 0
    return folder


RUNS = {
    "a model": lambda _, tmp: model(tmp),
    "a model in float32": lambda _, tmp: model(tmp, "fp32-highest"),
    "a model with wrong scores": lambda _, tmp: model(tmp, scores=doubled),
    "a model, few points": lambda _, tmp: model(tmp, points="q,attn_out,logits", scores=doubled),
    "a program": lambda get, tmp: recompared(get("own"), tmp),
    "a program with a wrong value": lambda get, tmp: recompared(get("own"), tmp / "run", wrong),
    "a program with a NaN": lambda get, tmp: recompared(get("own"), tmp / "run", not_finite),
    "a padded batch": lambda _, tmp: padded(tmp / "run", padded_batches.right()),
    "a padded batch, one too far": lambda _, tmp: padded(tmp / "run", padded_batches.right("one too far")),
    "a dump": lambda _, tmp: dumped(tmp),
    "a model on a mesh, without a shard": lambda _, tmp: meshed(tmp, "faulty"),
    "a predicted model": lambda _, tmp: predicted(tmp / "run"),
}
KEPT = ("a model with wrong scores", "a program", "a program with a wrong value", "a program with a NaN")


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Return what makes a run's folder, once for all screens."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = RUNS[name](request.getfixturevalue, tmp_path_factory.mktemp("counted"))
        return made[name]

    return folder


# The screens: what each says, and which verdicts of the gate it is of


def of_gate(folder, j):
    shown = io.StringIO()
    print_report(gate_report(j, str(folder)), Console(file=shown, width=200))
    line = next(x for x in shown.getvalue().splitlines() if x.startswith("verdicts: "))
    return counted(line), Counter(j.counts)


def of_gate_markdown(folder, j):
    text = as_markdown(gate_report(j, str(folder)))
    return counted(next(x for x in text.splitlines() if "verdicts: " in x)), Counter(j.counts)


def of_json(folder, _):
    lines = gate_report(gate(folder), str(folder)).records
    return Counter(v.status for v in lines), open_ones(gate(folder).counts)


def _sizes(texts):
    return sum(int(m.group(1)) if (m := SUCH.search(t)) else 1 for t in texts)


def of_junit(_, j):
    suites = JUnitXml.fromstring(render_junit(j).encode())
    found = Counter()
    for case in (case for suite in suites for case in suite):
        for result in case.result:
            found[result.type] += _sizes([result.message])
    return found, open_ones(j.counts)


def of_annotations(_, j):
    told = annotations(j)
    found = Counter()
    for text in told:
        found[re.search(r"title=precaudit ([a-z ]+)::", text).group(1)] += _sizes([text])
    of = Counter({s: n for s, n in open_ones(j.counts).items() if s not in SILENT})
    return (found, of) if len(told) < SHOWN else (None, None)


def of_heat_maps(folder, j):
    found = gather_run(folder)
    maps = map_cells(found.errors, found.suspects(), found.judgement.verdicts)
    every = sum((Counter(c.counts) for its in maps.values() for c in its), Counter())
    shown = [v for v in j.verdicts if v.point and (v.kind in MAP_OF or "/" in v.kind)]
    return open_ones(every), Counter(v.status for v in shown)


def of_session(folder, j):
    last = read_run(recall_run(folder), Filters(), None, lambda _: None)
    found = sum((counted(last.counts(kind)) for kind in last.maps), Counter())
    return open_ones(found), of_heat_maps(folder, j)[1]


def of_terminal(folder, j):
    found = gather_run(folder)
    if found.program is None:
        said = local_sentence(found.errors) or ""
        local = Counter(v.status for v in j.verdicts if v.kind == "local" and v.status in ("fail", "input suspect"))
        fails = re.match(r"(\d+) of ", said)
        suspects = re.search(r"; (\d+) inherit", said)
        told = {"fail": fails, "input suspect": suspects}
        return Counter({k: int(m.group(1)) for k, m in told.items() if m}), local
    return of_program_table(recalled_report(found, every=True).sections, j)


def of_page(folder, j):
    found = gather_run(folder)
    if found.program is None:
        return None, None
    return of_program_table(recalled_report(found, page=True).sections, j)


def of_program_table(sections, j):
    table = next(t for s in sections for t in s.tables if t.columns == COLUMNS)
    lines = [x for s in sections[:1] for x in s.lines if x.startswith("Verdicts on no row")]
    cells = [row[COLUMNS.index("verdicts")] for row in table.rows]
    return open_ones(sum(map(counted, [*cells, *lines]), Counter())), open_ones(j.counts)


def of_card(folder, j):
    found = gather_run(folder)
    if found.program is not None:
        return counted(card_text(j)), Counter(j.counts)
    said = next(x for x in card_text(found.compared).splitlines() if x.startswith("  verdicts: "))
    return counted(said), Counter(j.counts)


def of_policies(folder, j):
    found = gather_run(folder)
    if found.compared is None or found.program is not None:
        return None, None
    said = row_of(found.compared, j).verdict
    worst = next(iter(open_ones(j.counts).items()), None)
    return counted(said), Counter() if worst is None or j.exit_code == 0 else Counter([worst[0]] * worst[1])


SUMMARIES = (of_gate, of_gate_markdown, of_json, of_junit, of_annotations, of_card, of_policies)
SCREENS = (*SUMMARIES, of_heat_maps, of_session, of_terminal, of_page)


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("name", few(RUNS, *KEPT))
def test_every_screen_counts_as_the_gate_does(folders, name):
    folder = folders(name)
    j = gate(folder)
    for screen in SCREENS:
        told, of = screen(folder, j)
        assert told == of, (screen.__name__, told, of)


def test_the_runs_are_of_every_status_that_counts(folders):
    """Else the numbers would agree where there are none."""
    found = sum((Counter(gate(folders(name)).counts) for name in KEPT), Counter())
    assert {"pass", "fail", "nonfinite", "input suspect"} <= found.keys()


# A folder of several runs: each row of its table beside the gate of its run


WRONG = Parts(scores=doubled)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Three policies of a model: one that passes, one whose scores are wrong, and one that cannot run."""
    folder = tmp_path_factory.mktemp("policies") / "runs"
    parts = {"bf16": Parts(), "fp32-highest": WRONG}

    def load(policy):
        if policy.name not in parts:
            raise UserError("not here")
        return load_model("tiny", policy, device="cpu", parts=parts[policy.name])

    subjects = PolicySubjects([load_policy(name) for name in (*parts, "fp32")], load)
    select = Selection.parse(layers="0", points="q,k,scores,logits", phases="prefill")
    trace_policies(subjects, folder, [Prompt(id="a", prompt="x = 1")], select)
    return folder, compare_policies(folder, CompareOptions(accum=()), lambda *_: None)


def policy_counts(row):
    """What the column of verdicts says of a policy, as counts."""
    return counted(row[COLUMNS_OF_POLICIES.index("verdict")])


@pytest.mark.slow  # two runs of a model: 8 s
def test_a_folder_of_policies_counts_as_the_gate_of_each_run(policies, capsys):
    folder, (rows, said) = policies
    report = policies_report(rows, str(folder), said)
    judged = {row.policy: gate(folder / row.run) for row in rows if row.run}
    assert {name: j.exit_code for name, j in judged.items()} == {"bf16": 0, "fp32-highest": 1}
    worst = {name: dict(list(open_ones(j.counts).items())[:1]) for name, j in judged.items()}
    table = report.sections[0].tables[0]
    for row in table.rows:
        j = judged.get(row[0])
        if j is None:
            assert row[-1] == "? not recorded: not here"
            continue
        assert policy_counts(row) == (Counter() if j.exit_code == 0 else Counter(worst[row[0]]))
    failing = [name for name, j in judged.items() if j.exit_code == 1]
    assert report.headline.text.startswith(f"✗ {len(failing)} of {len(rows)} policies fail: {', '.join(failing)}.")
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=200))
    for text in (shown.getvalue(), as_markdown(report), as_html(report)):
        found = counted(re.sub(r"<[^>]+>", " ", text))
        assert open_ones(found) == sum(map(Counter, (worst[name] for name in failing)), Counter())
    records = [json.loads(line) for line in as_json(report)]
    assert [(r["policy"], r["verdict"]) for r in records] == [(r.policy, r.verdict) for r in rows]
    capsys.readouterr()
    assert cli(["gate", str(folder)]) == 1
    lines = [counted(x) for x in capsys.readouterr().out.splitlines() if x.startswith("verdicts: ")]
    assert lines == [Counter(j.counts) for j in judged.values()]


# Two runs that keep no tensors: no gate judges them, and every screen counts the records


def test_sketches_are_counted_alike_on_every_screen(tmp_path):
    other = {"mlp": WEIGHTS["mlp"].at[2].multiply(1.5)}
    options = ProgramTraceOptions(sketch=8)
    for name, weights in (("ours", WEIGHTS), ("theirs", other)):
        trace_program(replace(PROGRAM, params=weights), tmp_path / name, options=options)
    found = compare_any(tmp_path / "ours", tmp_path / "theirs")
    report = sketch_report(found)
    table = report.sections[0].tables[0]
    values, equal = (sum(int(row[table.columns.index(name)]) for row in table.rows) for name in ("values", "equal"))
    differ = sum(not r.equal for r in found.records)
    assert 0 < differ < len(found.records)
    assert (values, values - equal) == (len(found.records), differ)
    said = f"{differ} of {values} values differ in bits"
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=300))
    for text in (shown.getvalue(), as_markdown(report), as_html(report)):
        assert said in text
    lines = [json.loads(line) for line in as_json(report)]
    assert [(x["point"], x["equal"]) for x in lines] == [(r.point, r.equal) for r in found.records]
    written = [json.loads(x) for folder in found.folders for x in (folder / "sketches.jsonl").read_text().splitlines()]
    assert written == lines
    for line in shown.getvalue().splitlines():
        for m in DECIMAL.finditer(line):
            assert len(re.sub(r"e.*|[-.]", "", m.group()).lstrip("0")) <= 3, line


DECIMAL = re.compile(r"(?<![\w./:-])-?\d+\.(\d+)(e[-+]?\d+)?(?![\w.])")
SHARE = re.compile(r"explains? (-?[\d.]+) ?%")


@pytest.mark.parametrize("name", KEPT)
def test_numbers_have_three_digits_one_form_and_shares_lie_between_none_and_all(folders, name):
    folder = folders(name)
    j, found = gate(folder), gather_run(folder)
    shown = io.StringIO()
    for report in (gate_report(j, str(folder), verbose=True), recalled_report(found, every=True)):
        print_report(report, Console(file=shown, width=500))
    said = "\n".join([shown.getvalue(), *annotations(j), render_junit(j), card_text(j)])
    for line in said.splitlines():
        assert not re.search(r"(?<![\w.])-0(\.0+)? ?%", line), line
        assert not re.search(r"\de[-+]0\d", line), line
        assert all(0 <= float(x) <= 100 for x in SHARE.findall(line)), line
        for m in DECIMAL.finditer(line):
            digits = re.sub(r"e.*|[-.]", "", m.group()).lstrip("0")
            assert len(digits) <= 3 or len(m.group(1)) <= 1, (m.group(), line)
