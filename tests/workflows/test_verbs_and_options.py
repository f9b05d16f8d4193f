"""One name for one thing: what a function takes by keyword, and the options of its command."""

import inspect
import typing

import click
import pytest

import precaudit
from precaudit.cli import cli
from precaudit.schema.selection import FilterTexts
from precaudit.workflows.keywords import FILTERS

VERBS = {
    "align": precaudit.align,
    "compare": precaudit.compare,
    "diagnose": precaudit.diagnose,
    "gate": precaudit.gate,
    "gradcheck": precaudit.gradcheck,
    "import": precaudit.import_dump,
    "probe": precaudit.probe,
    "same": precaudit.same,
    "trace": precaudit.trace,
    "watch": precaudit.watch,
}
# Commands without a function of their name in ``precaudit``, and why.
COMMANDS_ALONE = {
    "audit": "it reads precaudit.toml: in Python assert_within_budget does it in a test",
    "baseline": "it freezes what a reviewer then sees in a commit",
    "bisect": "its trials run as processes with a command line of their own",
    "doctor": "it says what is installed",
    "explain": "it prints the glossary",
    "export": "frame() of what a function returns has the same columns",
    "init": "it writes files that start a project",
    "lint": "it is read on a screen or in CI; probe and check return records",
    "models": "it prints a table of families",
    "open": "it is a screen; open_run returns the run",
    "points": "points of a Run are its attribute",
    "report": "plot and what functions return are shown in a notebook",
    "rollout": "it serves and reads answers as files",
    "sweep": "it runs processes for its times",
    "warmup": "it fills a cache before a job",
}
SHOWN = "how it is printed or written: a function returns it"
SCREEN = dict.fromkeys(("as_json", "markdown", "html", "verbose", "every", "junit", "github"), SHOWN)
# Options that have another name as a keyword.
NAMED = {
    ("align", "no_points"): "points",
    ("compare", "no_cache"): "cache",
    ("compare", "names"): "reference",
    ("diagnose", "no_cache"): "cache",
    ("gate", "limits"): "at_most",
    ("gradcheck", "plain"): "hostile",
    ("import", "dump"): "source",
    ("import", "output"): "folder",
    ("probe", "no_time"): "timed",
    ("trace", "allow_field"): "allow",
    ("trace", "stats_only"): "sketch",  # sketch=0
    ("trace", "text"): "prompts",  # a list of texts
    ("watch", "gate"): "diagnose",
    ("watch", "no_compare"): "compare",
    ("watch", "words"): "command",
}
HOSTS = "several processes run one command"
# Options that no keyword stands for, and why.
OPTIONS_ALONE = {
    ("align", "output"): SHOWN,
    ("compare", "config"): "reference= takes names_of(map, config, family)",
    ("compare", "family"): "reference= takes names_of(map, config, family)",
    ("compare", "rerun"): "it runs a command again, in a process of its own",
    ("diagnose", "invariance"): "it prints a second table, after the findings",
    ("diagnose", "mesh"): "of --invariance",
    ("diagnose", "rerun"): "it runs a command again, in a process of its own",
    ("gradcheck", "failing"): SHOWN,
    ("gradcheck", "listing"): "it names what ships",
    ("gradcheck", "output"): SHOWN,
    ("probe", "output"): SHOWN,
    ("trace", "coordinator"): HOSTS,
    ("trace", "process"): HOSTS,
    ("trace", "processes"): HOSTS,
    ("trace", "repeat"): "precaudit.repeat does it",
    ("trace", "wait"): HOSTS,
    ("watch", "functions_file"): SHOWN,
}
VALUES = "a value of Python's, which no command line holds"
TOLD = "where work is told to; a command draws a bar"
RUNS = "a command computes what it needs, and keeps it"
# Keywords that no option stands for, and why.
KEYWORDS_ALONE = {
    **{(verb, "progress"): TOLD for verb in ("align", "compare", "diagnose", "same", "trace")},
    **{(verb, "advance"): TOLD for verb in ("gradcheck", "probe")},
    ("import", "tell"): TOLD,
    ("import", "command"): "what the run says made it",
    **{(verb, name): VALUES for verb in ("compare", "diagnose") for name in ("options", "select", "subject")},
    **{(verb, "fresh"): RUNS for verb in ("compare", "diagnose")},
    **{("diagnose", name): RUNS for name in ("accum", "formula", "jobs", "memory", "scheduler")},
    ("gate", "limits"): VALUES,  # Limits: the rules' own
    ("gradcheck", "name"): "what the kernel is called on a screen",
    ("same", "inputs"): VALUES,
    ("trace", "command"): "what the run says made it",
    ("trace", "forced"): VALUES,
    ("trace", "options"): VALUES,
    ("trace", "parts"): VALUES,
    ("trace", "reference"): "FILE.py:NAME, by which a Program is found again: SUBJECT says it",
    ("trace", "select"): VALUES,
    ("watch", "aside"): "whose stdout the script writes to",
    ("watch", "folder"): "a command runs where it is called",
}


def keywords(verb):
    """Return the parameters that a function takes, filters in a dictionary as well as one by one."""
    found = set()
    for p in inspect.signature(VERBS[verb]).parameters.values():
        if p.kind != inspect.Parameter.VAR_KEYWORD:
            found.add(p.name)
        elif p.name == "filters":
            found |= typing.get_args(p.annotation)[0].__annotations__.keys()
    return found


def options(verb):
    return {p.name for p in cli.get_command(None, verb).params if not getattr(p, "hidden", False)}


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_a_keyword_or_says_why_not(verb):
    stated = {name for of, name in OPTIONS_ALONE if of == verb}
    named = {name: NAMED[of, name] for of, name in NAMED if of == verb}
    lacking = options(verb) - keywords(verb) - named.keys() - SCREEN.keys()
    assert lacking - stated == set()
    assert stated - options(verb) == set()
    assert not stated & keywords(verb)
    assert set(named) <= options(verb)
    assert set(named.values()) <= keywords(verb)


@pytest.mark.parametrize("verb", VERBS)
def test_every_keyword_is_an_option_or_says_why_not(verb):
    stated = {name for of, name in KEYWORDS_ALONE if of == verb}
    named = {NAMED[of, name] for of, name in NAMED if of == verb}
    own = options(verb) - {name for of, name in NAMED if of == verb}
    assert keywords(verb) - own - named - {"unknown"} == stated


@pytest.mark.parametrize("verb", VERBS)
def test_filters_are_those_of_the_command(verb):
    others = {keyword for (of, _), keyword in NAMED.items() if of == verb}
    assert set(FILTERS) & keywords(verb) - others == set(FILTERS) & options(verb)
    assert set(FILTERS) == FilterTexts.__annotations__.keys()


def test_every_command_has_a_function_or_says_why_not():
    assert set(cli.list_commands(None)) == VERBS.keys() | COMMANDS_ALONE.keys()
    assert not COMMANDS_ALONE.keys() & set(precaudit.__all__)
    assert all(isinstance(cli.get_command(None, name), click.Command) for name in VERBS)
