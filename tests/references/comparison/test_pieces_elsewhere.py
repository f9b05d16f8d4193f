"""Runs of programs, pairs of runs and formulas as pieces of other processes: the records of one, byte for byte."""

import pytest

from precaudit.cli import run as run_cli
from precaudit.errors import UserError
from precaudit.recording.opening import open_any
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.between import compare_runs, open_same
from precaudit.references.comparison.program_pieces import Computing
from precaudit.references.comparison.programs import compare_program
from precaudit.references.textbook.pieces import Execution
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.clusters import running_cluster
from tests.helpers.pieces import Pickled

PROGRAM = """
import jax.numpy as jnp
import precaudit

def step(params, x, held):
    y = jnp.tanh((x @ params).astype(jnp.float32)).astype(jnp.bfloat16)
    return y, held + y

def begin(inputs, outputs):
    return outputs

weights = jnp.asarray([[0.3, -1.2], [0.7, 0.4]], jnp.bfloat16)
cases = {n: (jnp.full((2, 2), x, jnp.bfloat16), jnp.zeros((2, 2), jnp.bfloat16)) for n, x in (("a", 0.3), ("b", 1.1))}
program = precaudit.Program(
    step, weights, cases, steps=2, advance=lambda inputs, outputs: outputs, outputs=("y", "held"),
    then={"next": precaudit.Entry(step, begin, steps=1, advance=lambda inputs, outputs: outputs)},
)
"""
PROMPTS = [Prompt("p0", tokens=(5, 6, 7)), Prompt("p1", tokens=(8, 9))]
SELECTED = Selection.parse("3:4", "q,mlp_out,logits", "prefill,decode")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of tiny, in bfloat16 and in float32."""
    folder = tmp_path_factory.mktemp("pairs")
    how = TraceOptions(decode_steps=1)
    return [trace(load("tiny", policy), folder / policy, PROMPTS, SELECTED, how) for policy in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A run of a program of two entry points and two cases, and its name."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "mine.py").write_text(PROGRAM)
    name = f"{folder}/mine.py:program"
    trace_program(load_program(name), folder / "run", options=ProgramTraceOptions(reference=name))
    return folder / "run", name


def lines(found):
    return (found.folder / "errors.jsonl").read_bytes()


def written(folder):
    return [(folder / name).read_bytes() for name in ("errors.jsonl", "prefill_decode.jsonl", "compared.json")]


def test_a_program_beside_itself(program):
    folder, _ = program
    alone = lines(compare_runs(folder, folder))
    assert lines(compare_runs(folder, folder, by=Pickled(3))) == alone


@pytest.mark.turn  # 4 s
def test_a_run_of_a_program(program):
    folder, name = program
    alone = compare_program(folder, name, accum=("float16",)), written(folder)
    by = Pickled(8)
    assert (compare_program(folder, name, accum=("float16",), by=by), written(folder)) == alone
    cut = [(p.case, p.entry, p.calls) for p in by.given]
    assert cut[:4] == [("a", None, range(0)), ("a", 0, range(1)), ("a", 0, range(1, 3)), ("a", 1, range(1))]
    assert len(cut) == 10


def test_what_other_processes_cannot_compute_is_a_line(program, monkeypatch, capsys):
    folder, name = program
    with pytest.raises(UserError, match=r"^a Program in memory stays in this process: name it FILE\.py:NAME"):
        compare_program(folder, load_program(name), execution=Execution(Pickled(2)))
    with pytest.raises(UserError, match="a reference that is a function stays in this process"):
        compare_program(folder, name, lambda *_: {}, execution=Execution(Pickled(2)))
    with pytest.raises(UserError, match="a worker finds another run there"):
        open_same(folder, "another")
    with monkeypatch.context() as m:
        said = iter([Computing("cpu", 4, 16), Computing("cpu", 1, 2)])
        m.setattr(Computing, "here", lambda: next(said))
        with pytest.raises(UserError, match=r"a worker has 1 cpu device on 2 cores, and 4 cpu devices on 16 cores ask"):
            compare_program(folder, name, execution=Execution(Pickled(2)))
    with monkeypatch.context() as m:
        m.setattr("jax.default_backend", lambda: "gpu")
        with pytest.raises(UserError, match="several processes would share the memory of one gpu"):
            compare_program(folder, name, execution=Execution(Pickled(2)))
    assert run_cli(["compare", str(folder), "--rerun", "--jobs", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("--rerun runs the command of " + str(folder) + " again; leave out --jobs")
    assert "\n" not in said


@pytest.mark.slow  # starts processes that import JAX, and a cluster
@pytest.mark.parametrize("who", ["processes", "cluster"])
def test_processes_and_a_cluster_write_the_records_of_one(who, runs, program, tmp_path, capsys):
    folder, name = program
    given = {
        "pair": [runs[0].folder, runs[1].folder],
        "formula": [runs[0].folder, "--formula", "--no-cache"],
        "calls": [folder, folder],
        "program": [folder, "--program", name],
    }
    places = {k: (open_any(x[0]).folder, None if k in ("formula", "program") else x[1]) for k, x in given.items()}

    def compare_all(*how):
        found = {}
        for k, words in given.items():
            for path in places[k][0].rglob("errors.jsonl"):
                path.unlink()
            (places[k][0] / "compare.json").unlink(missing_ok=True)
            assert run_cli(["compare", *map(str, words), *how]) == 0
            said = capsys.readouterr().out
            assert ("MB of memory in one" in said) == bool(how)
            (path,) = places[k][0].rglob("errors.jsonl")
            found[k] = path.read_bytes()
        return found

    alone = compare_all()
    if who == "processes":
        assert compare_all("--jobs", "2") == alone
        return
    pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install -e '.[cluster]'")
    with running_cluster(2, tmp_path) as (address, _, _):
        assert compare_all("--scheduler", address) == alone
