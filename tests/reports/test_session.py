"""``precaudit open``: walked on by textual's pilot at 80 x 24, without a terminal, and while a run is written."""

import asyncio
import re
import shutil
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Event
from time import monotonic

import msgspec
import pytest

from precaudit.cli import run
from precaudit.cli.compare import command as compare_command
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.written import recall
from precaudit.references.comparison.between import compare_runs
from precaudit.reports.cells import map_cells
from precaudit.reports.gathered import recall_run
from precaudit.reports.session import app, jobs, reading
from precaudit.reports.session.filters import look_of, narrowed, parse_filters
from precaudit.reports.session.grid import Grid
from precaudit.schema.records.comparisons import CompareRecord
from precaudit.schema.records.errors import SumError, as_kind
from precaudit.schema.records.lines import read_record, write_lines
from precaudit.schema.selection import Filters
from tests.helpers.hostile import BAD
from tests.helpers.paths import ROOT

ALL = Filters()


@asynccontextmanager
async def opened(folder, filters=ALL, size=(80, 24)):
    """Yield a sitting that has read and judged all, and its pilot."""
    sitting = app.Sitting(folder, filters)
    async with sitting.run_test(size=size) as pilot:
        await settle(pilot)
        yield sitting, pilot


async def settle(pilot):
    await pilot.pause()
    while pilot.app.reading is not None:
        await asyncio.sleep(0.01)
    await pilot.app.workers.wait_for_complete()
    while pilot.app.reading is not None:  # a command's map
        await asyncio.sleep(0.01)
    await pilot.pause()


async def answer(pilot, key, text):
    """Press a key that asks for something, and answer."""
    await pilot.press(key)
    pilot.app.query_one("#ask").value = text
    await press(pilot, "enter")


async def press(pilot, *keys):
    await pilot.press(*keys)
    await settle(pilot)


def screen(sitting):
    """Return the lines that the terminal shows."""
    return ["".join(s.text for s in strip).rstrip() for strip in sitting.screen._compositor.render_strips()]


def unwrapped(sitting):
    """Return what the terminal shows as one text without spaces, frames and breaks of lines."""
    return "".join("".join(screen(sitting)).replace("│", "").split())


def row(sitting, point):
    return next(line for line in screen(sitting) if line.startswith(f"{point} "))


def toasts(sitting):
    return [n.message for n in sitting._notifications]


def test_arrows_tab_and_enter_walk_over_a_model_s_run(honest):
    async def sit():
        async with opened(honest) as (sitting, pilot):
            shown = screen(sitting)
            assert len(shown) == 24
            assert all(len(line) <= 80 for line in shown)
            assert shown[0].startswith("tiny · run run · policy bf16")
            assert f"rounding explains all {gate(honest).counts['pass']:,} errors" in shown[1]
            assert re.search(r" local +forward .* pass$", shown[2])
            assert shown[3].split() == ["3", "4", "end"]
            await press(pilot, "home", *["up"] * 20)
            assert "[" in row(sitting, "resid_in")
            await press(pilot, "down", "down", "right")
            assert re.fullmatch(r"q +.. +\[..\] *(  )?", row(sitting, "q"))
            assert any(line.startswith("✓ layer 4 q (") for line in screen(sitting))
            await press(pilot, "enter")
            told = "\n".join(screen(sitting))
            assert "explained" in told
            assert re.search(r"computed from +attn_norm", told)
            assert re.search(r"token \d+ .*«.»", told)  # in its context, as text
            assert "× what rounding leaves" in told
            await press(pilot, "escape", "tab")
            assert sitting.kind == "forward"
            assert any(line.startswith("✓ layer 4 q (") for line in screen(sitting))  # the cursor stays

    asyncio.run(sit())


@pytest.mark.turn  # 4 s
def test_filters_are_those_of_the_command_line_and_a_selection_is_one(honest):
    async def sit():
        async with opened(honest) as (sitting, pilot):
            await answer(pilot, "slash", "--layers 3 --points q,k,v --phases decode")
            assert [line.split()[0] for line in screen(sitting)[4:7]] == ["q", "k", "v"]
            assert screen(sitting)[3].split() == ["3"]
            assert "--phases decode" in screen(sitting)[2]
            only = [e for e in recall(honest).errors if (e.kind, e.point, e.phase) == ("local", "q", "decode")]
            (cell,) = (c for c in sitting.shown.maps["local"] if c.point == "q")
            assert sum(cell.counts.values()) == sum(e.layer == 3 for e in only)
            await answer(pilot, "slash", "--points qq")
            assert toasts(sitting) == ["the run holds no point 'qq'; did you mean 'q'?"]
            await press(pilot, "escape", *["up"] * 5, "shift+down", "x")
            return sitting.commands

    (line,) = asyncio.run(sit())
    assert line == f"precaudit compare {honest} --layers 3 --points q,k --phases decode"
    assert compare_command.make_context("compare", line.split()[2:]).params["points"] == "q,k"
    assert look_of(recall_run(honest), parse_filters(line.partition(f"{honest} ")[2]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--layer 3", "no filter 'layer'; did you mean 'layers'?"),
        ("--layers", "--layers needs a value"),
        ("--points 'q", "No closing quotation"),
    ],
)
def test_what_is_no_filter_is_told(text, told):
    with pytest.raises(UserError, match=re.escape(told)):
        parse_filters(text)


def test_filters_are_read_as_they_are_written():
    assert parse_filters("--layers=0:2 points q,k") == Filters("0:2", "q,k")
    assert parse_filters(Filters("3", None, "decode", "a b").text) == Filters("3", None, "decode", "a b")


def test_a_selection_names_what_was_recorded(honest):
    every = map_cells(recall(honest).errors)["local"]
    its = [replace(c, layer=i) for i in (3, 1, 2) for c in every if (c.layer, c.point) in ((3, "k"), (3, "v"))]
    logits = [c for c in every if c.layer is None]
    assert narrowed(Filters(None, "q", "decode"), [*its, *logits]) == Filters("1:4", "k,v,final_norm,logits", "decode")
    told = [replace(c, worst=as_kind(c.worst, SumError)) for c in its]
    assert narrowed(ALL, told) == Filters("1:4")  # with what sums of rows tell of


def test_a_program_s_run_by_the_same_keys(program_run):
    async def sit():
        async with opened(program_run) as (sitting, pilot):
            assert "1 case, 1 call" in screen(sitting)[0]
            await press(pilot, "enter")
            told = "\n".join(screen(sitting))
            assert re.search(r"line +\S*conftest.py:\d+", told)
            assert re.search(r"token \d", told)
            assert BAD not in told
            await press(pilot, "escape", "x")
            assert look_of(recall_run(program_run), parse_filters(sitting.commands[0].split(f"{program_run} ")[1]))
        async with opened(program_run, Filters(layers="1")) as (sitting, _):
            assert {c.layer for c in sitting.shown.maps["local"]} <= {1, None}

    asyncio.run(sit())


@pytest.mark.turn  # 3 s
def test_diagnose_and_compare_are_run_as_commands(honest, tmp_path, monkeypatch):
    words = "import sys; print('ran', *sys.argv[1:]); print('\\x1b[31m a'); sys.exit('diagnose' in sys.argv)"
    monkeypatch.setattr(jobs, "PRECAUDIT", (sys.executable, "-c", words))
    shutil.copytree(honest, tmp_path / "b")
    shutil.copytree(honest, tmp_path / "a")
    compare_runs(tmp_path / "a", tmp_path / "b")

    async def sit():
        async with opened(tmp_path / "a", size=(160, 24)) as (sitting, pilot):
            await press(pilot, "home", *["up"] * 20, "d")
            assert toasts(sitting) == ["no record is here: move to a cell first"]  # resid_in of the first layer
            sitting.clear_notifications()
            await press(pilot, "down", "d")
            told = "\n".join(screen(sitting))
            assert f"ran diagnose {tmp_path / 'a'} --layers 3 --points attn_norm".replace(" ", "") in unwrapped(sitting)
            assert "\\x1b[31m a" in told
            assert "exit code 1" in told
            await press(pilot, "escape")
            await answer(pilot, "c", "nowhere")
            assert toasts(sitting) == ["nowhere: no run here"]
            await press(pilot, "escape")
            sitting.clear_notifications()
            await answer(pilot, "c", str(tmp_path / "b"))
            assert f"ran compare {tmp_path / 'a'} {tmp_path / 'b'}".replace(" ", "") in unwrapped(sitting)
            await press(pilot, "escape")
            assert sitting.kind == "against"
            its = sitting.shown.maps["against"]
            assert {c.status for c in its} == {"pass"}
            assert {c.size for c in its} == {0.0}

    asyncio.run(sit())


def test_closing_ends_a_command(honest, monkeypatch):
    monkeypatch.setattr(jobs, "PRECAUDIT", (sys.executable, "-c", "import time; time.sleep(600)"))

    async def sit():
        async with opened(honest) as (_, pilot):
            await pilot.press("d")
            await pilot.pause(0.3)
            await press(pilot, "escape")  # waits for what still runs

    asyncio.run(asyncio.wait_for(sit(), 20))


def fewer(folder, keeps, **changes):
    """Write a compared run's records anew, as compare would with other filters."""
    found = recall(folder)
    kept = read_record(folder / "compare.json", CompareRecord, "a comparison")
    write_lines(folder / "errors.jsonl", [msgspec.structs.replace(e, **changes) for e in found.errors if keeps(e)])
    hashes = {name: file_hash(folder / name) for name in kept.hashes}
    write_lines(folder / "compare.json", [msgspec.structs.replace(kept, hashes=hashes)])


def test_what_is_written_meanwhile_is_shown(honest, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "LOOK", 0.05)
    shutil.copytree(honest, tmp_path / "run")
    shutil.copytree(honest, tmp_path / "whole")
    fewer(tmp_path / "run", lambda e: e.layer != 4 or e.point != "q")

    async def until(holds):
        for _ in range(200):
            await asyncio.sleep(0.05)
            if holds():
                return
        raise AssertionError("it was not shown")

    async def sit():
        async with opened(tmp_path / "run", size=(80, 40)) as (sitting, pilot):
            assert row(sitting, "q").split()[1:] == ["··", "[", "?]"]  # it is missing
            shutil.copy(tmp_path / "whole" / "errors.jsonl", tmp_path / "run" / "errors.jsonl")
            await until(lambda: "not compared yet, or changed since" in sitting.shown.waiting)
            assert "?" in row(sitting, "q")  # what was known stays
            shutil.copy(tmp_path / "whole" / "compare.json", tmp_path / "run" / "compare.json")
            await until(lambda: "?" not in row(sitting, "q"))
            await settle(pilot)
            assert "✓" in screen(sitting)[1]

    asyncio.run(sit())


def test_a_run_that_is_being_recorded_is_waited_for(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "run")
    manifest, whole = tmp_path / "run" / "run.json", (honest / "run.json").read_bytes()
    record = msgspec.json.decode(whole)
    manifest.write_bytes(msgspec.json.encode({**record, "finished": None}))
    (tmp_path / "run" / "batches.jsonl").write_text("{}\n{}\n")

    async def sit():
        async with opened(tmp_path / "run") as (sitting, pilot):
            assert "is being recorded: 2 batches are whole" in " ".join(screen(sitting))
            manifest.write_bytes(whole)
            sitting.look_again()
            await settle(pilot)
            assert "✓" in screen(sitting)[1]

    asyncio.run(sit())


def test_without_a_terminal_a_run_or_textual(honest, tmp_path, monkeypatch, capfd):
    def refused(*words):
        assert run(["open", *words]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "open needs a terminal; without one: precaudit report" in refused(str(honest))
    assert "no run here" in refused(str(tmp_path / "gone"))
    shutil.copytree(honest, tmp_path / "run", ignore=shutil.ignore_patterns("compare.json"))
    assert "not compared yet" in refused(str(tmp_path / "run"))
    monkeypatch.setattr("precaudit.cli.open.find_spec", lambda _: None)
    assert "pip install 'precaudit[session]'" in refused(str(honest))


@pytest.mark.parametrize(
    ("filters", "told"), [("7", "there are 5 (layers 0 to 4)"), (None, "a record of an unknown point")]
)
def test_what_is_seen_late_ends_the_sitting(honest, tmp_path, filters, told):
    if filters is None:
        honest = shutil.copytree(honest, tmp_path / "run")
        fewer(honest, lambda e: e.layer != 4, point="gone")

    async def sit():
        async with opened(honest, Filters(filters)) as (sitting, _):
            return str(sitting.failed)

    assert told in asyncio.run(sit())


def test_who_leaves_waits_for_nothing_that_is_read(honest, monkeypatch):
    waits = Event()
    monkeypatch.setattr(reading, "gather", lambda _: waits.wait(60))

    async def sit():
        sitting = app.Sitting(honest, ALL)
        async with sitting.run_test(size=(80, 24)) as pilot:
            while not sitting.shown.maps:
                await asyncio.sleep(0.01)
            assert "reading and judging" in screen(sitting)[1]
            await pilot.press("q")
        return sitting.reading is not None

    start = monotonic()
    assert asyncio.run(sit())
    assert monotonic() - start < 30
    waits.set()


def test_a_fault_of_ours_ends_the_sitting(honest, monkeypatch):
    monkeypatch.setattr(reading, "gather", lambda _: 1 / 0)

    async def sit():
        async with opened(honest) as (sitting, _):
            return sitting.failed

    assert isinstance(asyncio.run(sit()), ZeroDivisionError)


def test_a_map_of_many_layers_and_points_scrolls(honest):
    """The cursor stays in sight, names are cut, and no line is longer than the terminal."""

    async def sit():
        async with opened(honest) as (sitting, pilot):
            (one, *_) = sitting.shown.maps["local"]
            cells = {(i, f"{'long ' * 6}{p}"): replace(one, layer=i, point=f"{'long ' * 6}{p}") for i in range(126)
                     for p in range(40)}  # fmt: skip
            heat = sitting.query_one("HeatMap")
            heat.show(Grid("local", tuple(dict.fromkeys(p for _, p in cells)), tuple(range(126)), cells), (0, 0))
            for _ in range(3):
                await pilot.press("pagedown")
            await pilot.press("end")
            await pilot.pause()
            shown = screen(sitting)
            assert all(len(line) <= 80 for line in shown)
            assert shown[3].endswith(" 125")
            assert sum("[" in line for line in shown[4:-8]) == 1

    asyncio.run(sit())


def test_the_page_names_every_key():
    page = (ROOT / "docs" / "session.md").read_text()
    keys = {"slash": "`/`", "enter": "Enter", "tab": "Tab", "escape": "Esc"}
    for binding in app.Sitting.BINDINGS:
        assert re.search(rf"(?<!\w){re.escape(keys.get(binding.key, binding.key))}(?!\w)", page), binding.key
    footer = " ".join(f"{b.key_display or ('⏎' if b.key == 'enter' else b.key)} {b.description}"
                      for b in app.Sitting.BINDINGS if b.show and b.key != "tab")  # fmt: skip
    assert f"tab Map {footer}" in page
