"""budgets.toml: what is refused and where, and what each kind of rule does to a verdict."""

import msgspec
import pytest

from precaudit.errors import UserError
from precaudit.judging.applied_rules import Rules
from precaudit.judging.baselines import Baseline, BaselineLine, frozen_place
from precaudit.judging.budgets import Known, ratchet, read_budgets, resolve_budgets
from precaudit.judging.gate import gate
from precaudit.judging.metrics import METRICS, keeps_limit, metric_of
from precaudit.judging.rules import judge
from precaudit.schema.limits import default_limits
from precaudit.schema.records.errors import ERROR_KINDS, KINDS, Distribution, Narrow, Signed, Unexplained
from precaudit.schema.records.lines import write_lines
from tests.helpers.error_kinds import known_fields

LIMITS = default_limits()
HEAD = "# ours\n\n[[budget]]\n"  # an entry on line 3
GOOD = HEAD + 'points = "q"\nmetric = "rel_l2"\nlimit = 0.5\nwhy = "measured"\n'
RECORDED = Known(
    frozenset(["q", "k", "v", "attn_out", "logits", "k_cache", "v_cache"]), frozenset(["prefill", "decode"])
)


def unexplained(excess=0.5, gain=0.0, componentwise=0.5):
    none = Signed(value=0.0, noise=1.0)
    gains = Signed(value=gain, noise=1.0)
    return Unexplained(rel_l2=0.0, u=0.0, excess=excess, gain=gains, mean=none, componentwise=(componentwise, (0, 0)))


def error(point="q", kind="local", **fields):
    """Return a record that passes by the default limits, with ``fields`` changed."""
    given = {
        "prompt": "p0", "phase": "prefill", "step": 0, "layer": 1, "candidate": "run", "reference": "fp64",
        "dtype": "bfloat16", "n": 8, "rel_l2": 0.01, "mae": 0.01, "max_diff": 0.1, "cosine": 0.99, "max_ulp": 2,
        "bits_lost": 1.0, "snr": 40.0, "gain": -0.001, "mean": -0.002, "ratio": 1.0, "unexplained": unexplained(),
        "scopes": {
            "token": {"rel_l2": (0.02, 5), "max_diff": (0.1, 5), "excess": (0.5, 5)}, "head": {"excess": (0.5, 1)},
        },
    }  # fmt: skip
    return KINDS[kind](point=point, **(known_fields(kind, given) | fields))


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def entry(tmp_path, body, why='why = "measured"'):
    return written(tmp_path / "budgets.toml", f"{HEAD}{body}\n{why}\n")


def test_budgets_name_points_of_files_of_other_programs(tmp_path):
    """Records of gradcheck are a file: its points are named, and what is not in it is refused."""
    file = tmp_path / "errors.jsonl"
    record = {"layer": None, "prompt": "seed0"}
    write_lines(file, [error("kernel.dx", phase="backward", **record), error("kernel.out", phase="forward", **record)])
    body = 'points = "kernel.d*"\nphases = ["backward"]\nmetric = "rel_l2"\nlimit = {}'
    assert gate(file, entry(tmp_path, body.format(0.5))).exit_code == 0
    assert gate(file, entry(tmp_path, body.format(1e-6))).counts["fail"] == 1
    for wrong, says in (("kernel.dy", "names no point; did you mean"), ("q", "names no point")):
        with pytest.raises(UserError, match=says):
            gate(file, entry(tmp_path, body.format(1).replace("kernel.d*", wrong)))
    with pytest.raises(UserError, match="kind = 'forward' matches nothing recorded: local"):
        gate(file, entry(tmp_path, body.format(1) + '\nkind = "forward"'))


@pytest.fixture
def verdict(tmp_path):
    """Return the judge of one record under budgets; a record that passes has no verdict and is counted."""

    def apply(text, e, before=None):
        stated = read_budgets(written(tmp_path / "budgets.toml", text))
        frozen = Baseline(tmp_path, None, {frozen_place(e): before}) if before is not None else None
        rules = Rules(LIMITS, stated, frozen)
        found = rules.apply(e, "here")
        assert (found is None) == (rules.passed == 1)
        return "pass" if found is None else found

    return apply


def budget(**keys):
    """Return the text of one entry."""
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in keys.items()]
    return "[[budget]]\nwhy = 'measured'\n" + "\n".join(lines) + "\n"


def frozen(e, **values):
    return BaselineLine(
        prompt=e.prompt, phase=e.phase, step=e.step, layer=e.layer, point=e.point, kind=e.kind, **values
    )  # fmt: skip


def test_what_is_read(tmp_path):
    text = GOOD + '\n[[budget]] # two\nwhy = "w"\npoints = ["*_norm", "attn_*"]\nratchet = true\nmetric = "mae"\n'
    first, second = read_budgets(written(tmp_path / "budgets.toml", text))
    assert (first.line, first.of.points, first.factor, first.entry.limit) == (3, {"q"}, None, 0.5)
    assert second.line == 9
    assert second.of.points == {"mlp_norm", "final_norm", "attn_norm", "attn_out", "attn_proj"}
    assert second.factor == 1.5


def test_no_entries_are_no_budgets(tmp_path):
    assert read_budgets(written(tmp_path / "budgets.toml", "# none yet\n")) == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('metric = "rel_l2"\nlimits = 1', ("unknown key 'limits'", "'limit'")),
        ('metric = "rel_l2"\nlimit = "1"', ("float", "limit")),
        ('metric = "rel_l2"\nlimit = true', ("bool", "limit")),
        ('metric = "rel_l2"\nlimit = -1', ("limit = -1", "impossible")),
        ('metric = "rel_l2"\nlimit = nan', ("limit = nan", "impossible")),
        ('metric = "rel_l2"\nlimit = inf', ("limit = inf", "impossible")),
        ('metric = "mae"\nlimit = 1\nphases = []', ("phases is empty",)),
        ('metric = "mae"\nlimit = 1\npoints = []', ("points is empty",)),
        ('metric = "mae"\nlimit = 1\npoints = "k_cache"\nkind = "forward"', ("'k_cache' have no forward errors",)),
        ('metric = "mae"\nlimit = 1\npoints = "q"\nkind = "state"', ("'q' have no state errors",)),
        ('metric = "kl"\nlimit = 1\npoints = "q"', ("local errors have no kl; kind may be 'forward'",)),
        (
            'metric = "excess"\nlimit = 1\nkind = "forward"',
            ("kind may be 'local' or 'policy'",),
        ),
        ('metric = "mae"\nlimit = 1\npoints = "logits"\nlayers = "0"', ("'logits' are outside layers",)),
        ('metric = "mae"\nratchet = 0', ("ratchet = 0", "impossible")),
        ("unexplained = -2.0", ("unexplained = -2", "impossible")),
        ("unexplained = nan", ("unexplained = nan", "impossible")),
        ("unexplained = inf", ("unexplained = inf", "impossible")),
        ('metric = "mae"\nratchet = 0.5', ("ratchet = 0.5", "impossible")),
        ('metric = "mae"\nratchet = -1', ("ratchet = -1", "impossible")),
        ('metric = "mae"\nratchet = nan', ("ratchet = nan", "impossible")),
        ('metric = "mae"\nratchet = inf', ("ratchet = inf", "impossible")),
        ('metric = "mae"\nratchet = true\nscope = "head"', ("tensor scope",)),
        ('metric = "mae"', ("give one of limit, unexplained, ratchet, unknown",)),
        ('metric = "mae"\nratchet = false', ("give one of",)),
        ('metric = "mae"\nlimit = 1\nratchet = 2', ("give one of",)),
        ('unexplained = 1\nunknown = "allow"', ("give one of",)),
        ('unknown = "forbid"', ("unknown", "forbid")),
        ("limit = 1", ("needs a metric",)),
        ("ratchet = 2", ("needs a metric",)),
        ('metric = "rel_l3"\nlimit = 1', ("unknown metric 'rel_l3'", "'rel_l2'")),
        ('metric = "mae"\nlimit = 1\nscope = "heads"', ("unknown scope 'heads'", "'head'")),
        ('metric = "mae"\nlimit = 1\nphases = ["decod"]', ("unknown phase 'decod'", "'decode'")),
        ('metric = "mae"\nlimit = 1\nkind = "accum"', ("accum", "kind")),
        ('metric = "mae"\nlimit = 1\npoints = "atn_out"', ("'atn_out' names no point", "'attn_out'")),
        ('metric = "mae"\nlimit = 1\npoints = ["q", "Q*"]', ("'Q*' names no point",)),
        ('metric = "mae"\nlimit = 1\nlayers = 3', ("layers",)),
    ],
)
def test_a_wrong_entry_is_refused_with_its_line(tmp_path, body, words):
    path = entry(tmp_path, body)
    with pytest.raises(UserError) as said:
        read_budgets(path)
    assert str(said.value).startswith(f"{path}:3: ")
    assert not [w for w in words if w not in str(said.value)], str(said.value)


@pytest.mark.parametrize("why", ["", 'why = ""', 'why = " \\t"'])
def test_a_budget_says_why(tmp_path, why):
    path = entry(tmp_path, 'metric = "mae"\nlimit = 1', why)
    with pytest.raises(UserError, match=r":3: .*`?why`?"):
        read_budgets(path)


def test_the_line_is_that_of_the_wrong_entry(tmp_path):
    path = written(tmp_path / "budgets.toml", GOOD + GOOD.replace("limit", "limitt"))
    with pytest.raises(UserError, match=rf"{path}:10: unknown key 'limitt'"):
        read_budgets(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[budget]]\nwhy = \n", ("not TOML", "line 2")),
        ("version = 1\n" + GOOD, (":1:", "unknown key 'version'")),
        (GOOD + "[extra]\n", (":8:", "unknown key 'extra'")),
        ('[budget]\nwhy = "w"\n', (":1:", "[[budget]]")),
        ("budget = [1]\n", (":1:", "[[budget]]")),
    ],
)
def test_what_is_no_list_of_budgets_is_refused(tmp_path, text, words):
    path = written(tmp_path / "budgets.toml", text)
    with pytest.raises(UserError) as said:
        read_budgets(path)
    assert not [w for w in (str(path), *words) if w not in str(said.value)], str(said.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match="no budgets at"):
        read_budgets(tmp_path / "absent.toml")
    with pytest.raises(UserError, match=str(tmp_path)):
        read_budgets(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(UserError, match=r"latin\.toml"):
        read_budgets(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('points = "mlp_*"', ("match nothing recorded", "attn_out")),
        ('phases = ["rescore"]', ("match nothing recorded", "decode, prefill")),
        ('layers = "5"', ("layer 5 is out of range",)),
        ('layers = "-6"', ("out of range",)),
        ('layers = "7:"', ("name none of the 5",)),
        ('layers = "first"', ("'first'",)),
    ],
)
def test_a_budget_that_names_nothing_recorded_is_refused(tmp_path, body, words):
    path = entry(tmp_path, f'metric = "mae"\nlimit = 1\n{body}')
    with pytest.raises(UserError) as said:
        resolve_budgets(read_budgets(path), path, 5, RECORDED)
    assert str(said.value).startswith(f"{path}:3: ")
    assert not [w for w in words if w not in str(said.value)], str(said.value)


def test_layers_are_resolved(tmp_path):
    path = entry(tmp_path, 'metric = "mae"\nlimit = 1\nlayers = "0,-1"\nphases = ["prefill"]\npoints = ["q", "logits"]')
    (found,) = resolve_budgets(read_budgets(path), path, 5, RECORDED)
    assert found.of.layers == {0, 4}
    assert found.matches("local", "prefill", 4, "q")
    others = [("forward", "prefill", 4, "q"), ("local", "decode", 4, "q"), ("local", "prefill", 3, "q")]
    others += [("local", "prefill", 4, "k"), ("local", "prefill", None, "logits")]
    assert not [o for o in others if found.matches(*o)]


@pytest.mark.parametrize(
    ("metric", "value", "keeps", "breaks"),
    [
        ("rel_l2", 0.01, 0.01, 0.009),
        ("mae", 0.01, 0.02, 0.005),
        ("max_diff", 0.1, 0.1, 0.05),
        ("cosine", 0.99, 0.99, 0.995),
        ("snr", 40.0, 39.0, 41.0),
        ("max_ulp", 2, 2, 1),
        ("bits_lost", 1.0, 1.0, 0.5),
        ("gain", 0.001, 0.001, 0.0005),
        ("mean", 0.002, 0.002, 0.001),
        ("ratio", 1.0, 1.0, 0.9),
        ("excess", 0.5, 0.5, 0.4),
        ("componentwise", 0.5, 0.5, 0.4),
    ],
)
def test_a_limit_holds_and_breaks(verdict, metric, value, keeps, breaks):
    assert verdict(budget(metric=metric, limit=keeps), error()) == "pass"
    found = verdict(budget(metric=metric, limit=breaks), error())
    assert (found.status, found.metric, found.value, found.limit) == ("fail", metric, value, breaks)
    assert found.why == "measured"


def test_every_metric_is_told_from_a_record():
    kls = Distribution(
        positions=(3, 4), kl=(0.1, 0.3), kl_noise=None, top1=(1.0, 1.0), top5=(1.0, 1.0), top50=(1.0, 1.0),
        rank=(0, 0), logprob_error=(0.0, 0.0), gap=(1.0, 1.0), tv=(0.0, 0.1),
    )  # fmt: skip
    e = error(narrow=Narrow(cause="", says="", error=0.02, wide=0.01))
    logits = error(kind="forward", distribution=kls)
    each = (e, logits, error(kind="state", mismatched=0))
    assert {m for m in METRICS if all(metric_of(x, m, "tensor") is None for x in each)} == set()
    assert metric_of(logits, "kl", "tensor") == (0.3, None)
    assert metric_of(e, "kl", "tensor") is None
    assert metric_of(e, "price", "tensor") == (2.0, None)
    assert metric_of(e, "componentwise", "tensor") == (0.5, (0, 0))
    assert metric_of(e, "rel_l2", "token") == (0.02, 5)
    assert metric_of(e, "rel_l2", "head") is None
    assert metric_of(error(unexplained=None), "excess", "tensor") is None


def test_a_narrow_format_inside_an_output_has_a_price_too():
    """An output has no local record: its forward one holds what the format costs."""
    cheap, dear = (Narrow(cause="c", says="sums in bfloat16", error=x, wide=0.01) for x in (0.019, 0.03))
    assert judge(error(kind="forward", narrow=cheap), LIMITS).status == "pass"
    found = judge(error(kind="forward", narrow=dear), LIMITS)
    assert (found.status, found.metric, found.text) == ("fail", "price", "sums in bfloat16")


def spread(**rows):
    """Return a record of logits of three positions that agree but for some numbers."""
    same = {"kl": 0.0, "top1": 1.0, "top5": 1.0, "top50": 1.0, "rank": 0, "logprob_error": 0.0, "gap": 1.0, "tv": 0.0}
    numbers = {name: (x,) * 3 for name, x in same.items()} | rows
    return error("logits", "forward", distribution=Distribution(positions=(3, 4, 5), kl_noise=None, **numbers))


@pytest.mark.parametrize(
    ("metric", "numbers", "worst", "keeps", "breaks"),
    [
        ("kl", (0.1, 0.3, 0.0), 0.3, 0.3, 0.29),
        ("logprob_error", (0.1, -0.3, 0.0), 0.3, 0.3, 0.29),
        ("rank", (0, 4, 1), 4.0, 4, 3),
        ("tv", (0.0, 0.25, 0.0), 0.25, 0.25, 0.2),
        ("top1", (1.0, 0.0, 1.0), 0.0, 0, 1),
        ("top5", (1.0, 0.8, 0.6), 0.6, 0.6, 0.8),
    ],
)
def test_a_limit_of_a_distribution_is_of_its_worst_position(verdict, metric, numbers, worst, keeps, breaks):
    e = spread(**{metric: numbers})
    assert metric_of(e, metric, "tensor") == (worst, None)
    assert verdict(budget(kind="forward", points="logits", metric=metric, limit=keeps), e) == "pass"
    found = verdict(budget(kind="forward", points="logits", metric=metric, limit=breaks), e)
    assert (found.status, found.value) == ("fail", worst)


def test_a_position_without_a_number_keeps_no_limit(verdict):
    for kls in ((0.1, "nan", 0.0), ("nan", 0.1, 0.0)):
        found = verdict(budget(kind="forward", points="logits", metric="kl", limit=1), spread(kl=kls))
        assert found.status in ("fail", "nonfinite")
    assert metric_of(spread(kl=()), "kl", "tensor") is None


def test_nan_keeps_no_limit():
    assert not [m for m in METRICS if keeps_limit(m, float("nan"), 1.0)]


def test_a_limit_at_a_scope_names_the_index(verdict):
    assert verdict(budget(metric="rel_l2", limit=0.02, scope="token"), error()) == "pass"
    found = verdict(budget(metric="rel_l2", limit=0.01, scope="token"), error())
    assert (found.status, found.scope, found.index) == ("fail", "token", 5)


def test_what_a_record_does_not_hold_is_unknown(verdict):
    found = verdict(budget(metric="rel_l2", limit=1, scope="head"), error())
    assert (found.status, found.text) == ("unknown", "the record has no rel_l2 at scope head")
    assert verdict(budget(metric="kl", limit=1, kind="forward"), error(kind="forward")).status == "unknown"


def test_only_records_under_a_budget_are_held_to_it(verdict):
    strict = budget(points="q", kind="local", phases=["prefill"], metric="rel_l2", limit=0.001)
    assert verdict(strict, error()).status == "fail"
    assert verdict(strict, error("k")) == "pass"
    assert verdict(strict, error(kind="forward")) == "pass"
    assert verdict(strict, error(phase="decode")) == "pass"


def test_unexplained_replaces_the_default_limit(verdict):
    above = error(unexplained=unexplained(excess=LIMITS.narrow.tensor.value * 2))
    assert verdict("", above).limit == LIMITS.narrow.tensor.value
    assert verdict(budget(unexplained=LIMITS.narrow.tensor.value * 3), above) == "pass"
    found = verdict(budget(unexplained=0.4), error())
    assert (found.status, found.metric, found.value, found.limit) == ("fail", "excess", 0.5, 0.4)


@pytest.mark.parametrize(
    "fault",
    [
        {"unexplained": unexplained(gain=100.0)},
        {"unexplained": unexplained(componentwise=100.0)},
        {"scopes": {"token": {"excess": (100.0, 5)}, "head": {"excess": (0.5, 1)}}},
    ],
)
def test_unexplained_leaves_the_other_default_limits(verdict, fault):
    assert verdict("", error(**fault)).status == "fail"
    found = verdict(budget(unexplained=1.0), error(**fault))
    assert found != "pass"
    assert found.status == "fail"


def test_a_limit_stands_in_for_the_default_rule(verdict):
    far = error(kind="forward", ratio=100.0)
    assert verdict("", far).status == "fail"
    assert verdict(budget(kind="forward", metric="rel_l2", limit=0.5), far) == "pass"


@pytest.mark.parametrize("status", ["nonfinite", "missing"])
def test_no_budget_lets_nan_or_absence_pass(verdict, status):
    e = error(nonfinite=3) if status == "nonfinite" else error(missing="requested, not in the run")
    for rule in ({"metric": "rel_l2", "limit": 1e9}, {"unexplained": 1e9}, {"unknown": "allow"}):
        assert verdict(budget(**rule), e).status == status
    assert verdict(budget(metric="rel_l2", ratchet=9), e, frozen(e, rel_l2=1e9)).status == status


def test_a_value_of_nan_breaks_a_limit(verdict):
    for metric, status in (("rel_l2", "nonfinite"), ("cosine", "fail")):
        assert verdict(budget(metric=metric, limit=0), error(**{metric: "nan"})).status == status


@pytest.mark.parametrize(
    ("before", "emulated", "factor", "now", "status"),
    [
        (0.010, 0.001, True, 0.0149, "pass"),
        (0.010, 0.001, True, 0.0151, "fail"),
        (0.010, 0.001, 2.0, 0.0199, "pass"),
        (0.010, 0.001, 2.0, 0.0201, "fail"),
        (0.001, 0.010, True, 0.0199, "pass"),  # twice the emulated error: noise alone must not break it
        (0.001, 0.010, True, 0.0201, "fail"),
        (0.010, 0.001, 1, 0.0101, "fail"),
        (0.0, 0.010, True, 0.0199, "pass"),
    ],
)
def test_a_ratchet_allows_a_factor_and_noise(verdict, before, emulated, factor, now, status):
    e = error(kind="forward", rel_l2=now, ratio=now / emulated)
    found = verdict(budget(kind="forward", metric="rel_l2", ratchet=factor), e, frozen(e, rel_l2=before))
    assert (found if found == "pass" else found.status) == status
    if status == "fail":
        assert found.limit == pytest.approx(max(float(1.5 if factor is True else factor) * before, 2 * emulated))


@pytest.mark.parametrize(
    ("before", "factor", "noise", "limit"),
    [(0.01, 2.0, 0.0, 0.02), (0.01, 2.0, 0.03, 0.03), (0.0, 1.5, 1e-6, 1e-6), (None, 2.0, 1.0, None),
     ("inf", 2.0, 1.0, None), ("nan", 2.0, 1.0, None)],
)  # fmt: skip
def test_a_ratchet_of_any_kind_is_one_rule(before, factor, noise, limit):
    assert ratchet(before, factor, noise) == limit


def test_a_ratchet_without_emulated_error_holds_the_factor_alone(verdict):
    e = error(ratio=None)
    assert verdict(budget(metric="rel_l2", ratchet=True), e, frozen(e, rel_l2=0.009)) == "pass"
    assert verdict(budget(metric="rel_l2", ratchet=True), e, frozen(e, rel_l2=0.006)).status == "fail"


def test_a_ratchet_needs_a_baseline_value(verdict):
    text = budget(metric="rel_l2", ratchet=True)
    assert verdict(text, error()).status == "missing"
    assert verdict(text, error(), frozen(error(), mae=0.1)).status == "missing"
    rules = Rules(LIMITS, (), None)
    assert rules.apply(error(), "here") is None  # the same record, not under a ratchet


def test_unknown_allowed_passes_and_says_nothing_else_does(verdict):
    allow = budget(points="q", unknown="allow")
    assert verdict("", error(unknown="no emulation")).status == "unknown"
    assert verdict(allow, error(unknown="no emulation")) == "pass"
    assert verdict(allow, error("k", unknown="no emulation")).status == "unknown"
    assert verdict(allow, error(unexplained=unexplained(excess=100.0))).status == "fail"
    assert verdict(allow, error(missing="gone")).status == "missing"
    assert verdict(allow, error(nonfinite=1)).status == "nonfinite"
    assert verdict(allow, error()) == "pass"


def test_unknown_allowed_excuses_no_broken_limit(verdict):
    e = error(unknown="no emulation", unexplained=None)
    allow, strict = budget(points="q", unknown="allow"), budget(metric="rel_l2", limit=0.001)
    assert {verdict(text, e).status for text in (allow + strict, strict + allow)} == {"fail"}
    assert verdict(allow + budget(metric="rel_l2", limit=0.1), e) == "pass"


def test_unexplained_at_a_scope_that_is_not_there_is_unknown(verdict):
    assert verdict(budget(unexplained=1.0, scope="channel"), error()).status == "unknown"
    assert verdict(budget(unexplained=1.0, scope="token"), error()) == "pass"


def test_a_limit_judges_what_the_default_rule_cannot(verdict):
    e = error(unknown="no emulation", unexplained=None)
    assert verdict(budget(metric="rel_l2", limit=0.1), e) == "pass"
    assert verdict(budget(metric="rel_l2", limit=0.001), e).status == "fail"
    assert verdict(budget(unexplained=1.0), e).status == "unknown"
    assert verdict(budget(metric="rel_l2", limit=0.1), error(unknown="no emulation", rel_l2=None)).status == "unknown"


def test_every_budget_over_a_record_has_to_hold(verdict):
    loose, strict = budget(metric="rel_l2", limit=1), budget(metric="mae", limit=0.001)
    assert verdict(loose + budget(metric="mae", limit=1), error()) == "pass"
    for text in (loose + strict, strict + loose):
        assert verdict(text, error()).metric == "mae"


def test_a_broken_budget_outweighs_one_that_cannot_be_judged(verdict):
    text = budget(metric="rel_l2", limit=1, scope="head") + budget(metric="rel_l2", limit=0.001)
    assert verdict(text, error()).status == "fail"


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf", "1.5"])
def test_impossible_limits_of_cosine_are_refused(tmp_path, limit):
    with pytest.raises(UserError, match="impossible"):
        read_budgets(entry(tmp_path, f'metric = "cosine"\nlimit = {limit}'))


@pytest.mark.parametrize("metric", ["kl", "cosine", "excess"])
def test_a_ratchet_on_what_no_baseline_holds_is_refused(tmp_path, metric):
    with pytest.raises(UserError, match=metric):
        read_budgets(entry(tmp_path, f'metric = "{metric}"\nratchet = true'))


def test_a_ratchet_from_a_nonfinite_value_does_not_pass(verdict):
    found = verdict(budget(metric="rel_l2", ratchet=True), error(rel_l2=1e9), frozen(error(), rel_l2="inf"))
    assert found != "pass"


def test_a_file_is_judged_under_budgets(tmp_path):
    errors = tmp_path / "errors.jsonl"
    write_lines(errors, [error(), error("k"), error(layer=2)])
    path = entry(tmp_path, 'points = "q"\nlayers = "1"\nmetric = "rel_l2"\nlimit = 0.001')
    found = gate(errors, budgets=path)
    assert found.counts == {"fail": 1, "pass": 2}
    assert (found.exit_code, found.verdicts[0].layer, found.verdicts[0].why) == (1, 1, "measured")


def test_budgets_that_match_nothing_in_a_file_are_named(tmp_path):
    errors = tmp_path / "errors.jsonl"
    write_lines(errors, [error()])
    path = entry(tmp_path, 'points = "v"\nmetric = "rel_l2"\nlimit = 1')
    with pytest.raises(UserError, match=rf"{path}:3: .*match nothing recorded: q"):
        gate(errors, budgets=path)


def test_the_last_layer_of_a_file_can_be_named(tmp_path):
    errors = tmp_path / "errors.jsonl"
    write_lines(errors, [error(layer=i) for i in range(3)])
    assert gate(errors, budgets=entry(tmp_path, 'metric = "rel_l2"\nlimit = 0.001\nlayers = "-1"')).counts["fail"] == 1


def test_records_survive_their_file(tmp_path):
    write_lines(tmp_path / "errors.jsonl", [error(snr="inf", rel_l2=0.0)])
    e = msgspec.json.decode((tmp_path / "errors.jsonl").read_bytes(), type=ERROR_KINDS)
    assert metric_of(e, "snr", "tensor") == (float("inf"), None)
