"""Options of earlier versions and of other tools."""

import pytest

from precaudit.cli import cli, run
from precaudit.cli._spellings import BARE, ELSEWHERE, OLD, current_spelling


def command(name):
    return cli.get_command(None, name)


def spelt(name):
    return {x for p in command(name).params for x in p.opts}


def test_new_spellings_are_options_and_old_ones_are_not():
    for name, pairs in OLD.items():
        assert set(pairs.values()) <= spelt(name)
        assert not set(pairs) & spelt(name)
    assert {option for name, option in BARE} == {"--markdown"}
    for word, ours in ELSEWHERE.items():
        assert any(set(ours) & spelt(name) for name in cli.list_commands(None)), word


@pytest.mark.parametrize(
    ("name", "words", "now", "notes"),
    [
        ("sweep", "tiny --policies a,b", "tiny --policy a,b", 1),
        ("sweep", "tiny --policies=a,b", "tiny --policy=a,b", 1),
        ("rollout", "tiny --policy a", "tiny --policy a", 0),
        ("lint", "tiny --phase decode", "tiny --phases decode", 1),
        ("report", "run --markdown", "run --markdown -", 1),
        ("report", "--markdown --all run", "--markdown - --all run", 1),
        ("report", "run --markdown a.md", "run --markdown a.md", 0),
        ("watch", "--gate --json f -- python s.py --json x", "--gate --functions f -- python s.py --json x", 1),
        ("watch", "--most 8GB --json f python s.py --json x", "--most 8GB --functions f python s.py --json x", 1),
        ("watch", "python s.py --json x", "python s.py --json x", 0),
        ("gate", "run --policies x", "run --policies x", 0),
    ],
)
def test_old_words_are_said_in_new_ones(name, words, now, notes):
    found, said = current_spelling(command(name), words.split())
    assert (" ".join(found), len(said)) == (now, notes)


def test_the_note_is_on_stderr_and_the_command_runs(capfd):
    assert run(["sweep", "tiny", "--policies", " ,"]) == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "note: --policies is --policy now; the old word works in this version alone",
        "precaudit: --policy ' ,' names no policy",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trace tiny --dtype bfloat16", "here it is --policy NAME, such as bf16"),
        ("sweep tiny --max-tokens 4", "here it is --new-tokens"),
        ("trace tiny --max-tokens 4", "here it is --decode-steps"),
        ("trace tiny --tensor-parallel-size 4", "here it is --mesh model=N"),
        ("gate run --layer 4", "here it is --layers"),
        ("gate run --dtype x", "No such option '--dtype'."),
        ("rollout tiny --trainer-policy bf16,fp32", "'bf16,fp32' names 2 policies, and one is wanted here"),
        ("trace tiny --points lm_head", "unknown point 'lm_head'; here it is 'logits'"),
        ("trace tiny --points q,model.layers.0.self_attn.q_proj", "here it is 'q'"),
        ("trace tiny --points gate_proj", "the next point after it is 'gate_out'"),
        ("trace tiny --prompt def\u00a0main", "a text of your own goes to trace --text"),
    ],
)
def test_words_of_other_tools_are_known(words, told, capfd):
    assert run(words.split(" ")) == 2
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("words", ["trace", "lint", "init", "points", "rollout", "sweep", "models", "same tiny"])
def test_a_file_without_a_name_says_which_programs_it_holds(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import precaudit\nraise SystemExit\none = precaudit.Program(f)\ntwo = Program(g)\n"
    )
    assert run([*words.split(), "mine.py"]) == 2
    told = "precaudit: mine.py is a file of Python: name the program in it, mine.py:one or mine.py:two\n"
    assert capfd.readouterr().err.endswith(told)
    assert not (tmp_path / "precaudit.toml").exists()


def test_a_file_without_a_program_is_said_to_have_none(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = (\n")
    assert run(["trace", "mine.py"]) == 2
    assert "give mine.py:NAME, a precaudit.Program in it; none is seen there" in capfd.readouterr().err
