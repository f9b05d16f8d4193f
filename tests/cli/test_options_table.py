"""One name for one thing: commands × options, read from the commands themselves."""

import click
import pytest

from precaudit.cli import cli

FILTERS = ("--layers", "--points", "--phases", "--prompt", "--case", "--positions")
REPORTS = ("--markdown", "--html", "--json")
WHOLE = "a baseline is of all that a run holds; gate with filters judges a part of it"
ALIKE = "a point is the same in every layer, case and call"
OUTPUTS = "it compares outputs of whole programs; a watched run is run again, whole"
LARGEST = "it looks for the largest values of a run: a part would hide an overflow"
NO_CASES = "a script's calls are chosen by --function and --calls"
NO_REPORT = "it writes files, and prints their names"
# Why a command lacks an option that commands of its kind have.
LACKING = {
    **{("baseline", name): WHOLE for name in FILTERS},
    **{("points", name): ALIKE for name in ("--layers", "--prompt", "--case", "--positions")},
    **{("same", name): OUTPUTS for name in ("--layers", "--points", "--phases", "--positions")},
    **{("lint", name): LARGEST for name in ("--layers", "--points", "--prompt", "--case", "--positions")},
    **{("watch", name): NO_CASES for name in ("--phases", "--prompt", "--case")},
    ("watch", "--json"): "stdout is the script's own: --functions FILE writes the records",
}
# Commands that take a run and print no report, and those whose report stands on a screen of its own.
WITHOUT_REPORT = {"baseline": NO_REPORT, "export": NO_REPORT, "open": "it is a screen", "trace": NO_REPORT}
TAKING_POLICIES = {"lint", "rollout", "sweep", "trace", "warmup"}
ONE_POLICY = {
    "bisect": "the policy of both sides, of which something else changes",
    "compare": "a dump was computed in one",
}


def options(name):
    command = cli.get_command(None, name)
    return {spelt: p for p in command.params if isinstance(p, click.Option) and not p.hidden for spelt in p.opts}


def reads_run(name):
    """Whether a parameter that is no output is a run, by what its help calls it."""
    command = cli.get_command(None, name)
    context = click.Context(command)
    return any(
        "RUN" in p.make_metavar(context) and p.name != "output" and name != "trace" for p in command.params
    )  # trace makes runs, and reads one for its tokens


COMMANDS = cli.list_commands(None)
READING = [name for name in COMMANDS if reads_run(name)]
REPORTING = [name for name in COMMANDS if {"--json", "--markdown", "--html"} & options(name).keys()]


def test_the_commands_that_read_a_run_are_these():
    assert READING == [
        "baseline", "compare", "diagnose", "export", "gate", "lint", "open", "points", "report", "same",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*READING, "sweep", "trace", "watch"])
def test_what_reads_or_records_a_run_has_every_filter(name):
    lacking = {x for x in FILTERS if x not in options(name)}
    stated = {x for x in FILTERS if (name, x) in LACKING}
    assert lacking == stated


@pytest.mark.parametrize("name", COMMANDS)
def test_a_filter_means_one_thing(name):
    """Every filter is one text with commas; only of same it may be given again, as it could before."""
    of = options(name)
    for x in set(FILTERS) & of.keys():
        assert of[x].type is click.STRING
        assert not of[x].is_flag
        assert not of[x].multiple or name == "same"
    assert not {"--phase", "--position", "--layer", "--point", "--policies", "--cases"} & of.keys()


@pytest.mark.parametrize("name", REPORTING)
def test_what_reports_writes_markdown_pages_and_json(name):
    of = options(name)
    assert {x for x in REPORTS if x not in of} == {x for x in REPORTS if (name, x) in LACKING}
    for x in ("--markdown", "--html"):
        assert isinstance(of[x].type, click.Path)
        assert not of[x].is_flag
        assert of[x].metavar == "FILE"
    assert "--json" not in of or of["--json"].is_flag


def test_what_reads_a_run_reports_or_says_why_not():
    assert {name for name in (*READING, "trace") if name not in REPORTING} == WITHOUT_REPORT.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_is_o_everywhere(name):
    for p in cli.get_command(None, name).params:
        if p.name == "output":
            assert p.opts == ["-o", "--output"]
            assert isinstance(p.type, click.Path)


def test_policies_are_named_by_one_option():
    taking = {name for name in COMMANDS if "--policy" in options(name)}
    assert taking == TAKING_POLICIES | ONE_POLICY.keys()
    assert {name for name in taking if options(name)["--policy"].metavar == "A,B"} == TAKING_POLICIES


def test_reasons_are_of_commands_that_are_there():
    assert {name for name, _ in LACKING} <= set(COMMANDS)
    assert all(x in (*FILTERS, *REPORTS) for _, x in LACKING)
