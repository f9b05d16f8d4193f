"""What several processes tell each other and write together, in one process: the others' answers are given."""

import io
from types import SimpleNamespace

import click
import msgspec
import numpy as np
import pytest

from precaudit.cli import _hosts, trace
from precaudit.errors import UserError
from precaudit.recording.programs.resuming import _is_whole
from precaudit.recording.runs import hosts as processes
from precaudit.recording.runs.arrays import OCDBT, TENSORS, Arrays, Part, WrittenArray, arrays_hash, stored_arrays
from precaudit.recording.runs.hosts import Hosts, common_facts, lost_others
from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.runs.shards import Shards, check_shared, note_shard
from precaudit.recording.runs.unfinished import Continuation, _other_conditions, trim
from precaudit.recording.tracing.parts import Spread
from precaudit.schema.records.manifests import MANIFEST


class Client:
    """The keys that processes share; what is not there never comes."""

    def __init__(self, **there):
        self.held = {name.replace("__", "/"): x for name, x in there.items()}

    def key_value_set(self, name, text):
        self.held[name] = text

    def blocking_key_value_get(self, name, _milliseconds):
        if name not in self.held:
            raise RuntimeError("DEADLINE_EXCEEDED: nobody")
        return self.held[name]

    def key_value_dir_get(self, name):
        return [(key, x) for key, x in self.held.items() if key.startswith(name)]


def answering(what, text, index=0):
    """Return a process of two, the other of which has said something already."""
    client = Client()
    client.held[f"precaudit/{what}/1/{1 - index}"] = f"={text}"
    return Hosts(index, 2, client)


def facts(**said):
    return msgspec.json.encode(said).decode()


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"policy": "bf16"}, {"policy": "fp32"}, "process 0 and process 1 differ in policy (bf16 and fp32): all have"),
        ({"policy": "bf16"}, {}, "differ in policy (bf16 and nothing)"),
        ({}, {"flag": "x"}, "differ in flag (nothing and x)"),
        ({"weights": "0" * 32}, {"weights": "1" * 32}, "differ in weights: all have"),
    ],
)
def test_what_processes_have_to_have_alike(ours, theirs, told):
    with pytest.raises(UserError) as error:
        answering("the start", facts(**theirs)).agree("the start", ours)
    assert told in str(error.value)
    answering("the start", facts(**ours)).agree("the start", ours)


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(UserError, match=r"process 1 of 2 did not come within 300 s, at: writing a"):
        Hosts(0, 2, Client()).share("writing a")
    assert Hosts().share("alone", "x") == ["x"]


def test_a_folder_that_another_process_does_not_see(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{}")
    host = answering("the run's folder", "")
    host.client.held["precaudit/the run's folder/2/1"] = "="
    with pytest.raises(UserError, match=r"process 1 does not see .*run.json of process 0"):
        check_shared(path, host)


def test_of_processes_that_fail_the_first_speaks(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0)
    client = Client()
    client.held[f"{processes.FAILED}/000000"] = "failed"
    assert not Hosts(1, 2, client).fail("mine")
    assert Hosts(0, 2, client).fail("mine")


def test_only_an_error_of_jax_says_that_another_process_is_gone():
    assert lost_others(RuntimeError("Gloo all-reduce failed: Connection reset by peer"))
    assert not lost_others(UserError("coordination: Connection reset"))
    assert not lost_others(ValueError("shapes differ"))


def test_flags_and_files_are_among_what_has_to_be_alike(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    found = common_facts({"--policy": "bf16"})
    assert (
        found.items() >= {"--policy": "bf16", "XLA_FLAGS": "--one", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}.items()
    )
    assert "JAX_PROCESS_ID" not in found
    program = tmp_path / "own.py"
    program.write_text("a = 1")
    given = {"subject": f"{program}:program", "policy": "bf16"}
    with click.Context(trace.command):
        before = _hosts._options_given(given)
        program.write_text("a = 2")
        after = _hosts._options_given(given)
    assert {name for name in before if before[name] != after[name]} == {f"the bytes of {program}"}


def test_what_is_said_of_a_child_that_was_ended():
    def said(by, joined, coordinator="localhost:1", processes=2, process=0):
        return _hosts._ended(by, joined, coordinator, processes, process, 3)

    assert said(9, True).startswith("process 0 of 2 was ended by signal 9 (SIGKILL); ")
    assert said(6, True).startswith("process 0 of 2 lost another one, ")
    assert said(6, False).startswith("of 2 processes not all came to localhost:1 within 3 s")
    assert said(6, False, process=1).startswith("no coordinator answers at localhost:1 within 3 s")
    assert said(6, True, processes=None, process=None).startswith("this process lost another one, ")


@pytest.mark.parametrize(
    ("code", "said", "given"),
    [(0, b"joined", 0), (1, b"joined", 1), (-6, b"joinedleft", 2), (-6, b"joined", None), (-6, b"joineddone", 0)],
)
def test_a_child_that_has_done_all_may_end_as_it_likes(code, said, given):
    assert _hosts._exit_code(code, said) == given


def test_what_libraries_print_is_not_shown():
    """Nor the lines that follow theirs, up to the next of ours."""
    lines = ["a table\n", "E1128 23:00:00 client.cc] gone\n", "  of it\n", "precaudit: said\n", "more\n"]
    shown = io.StringIO()
    _hosts._pass_on(io.StringIO("".join(lines)), shown)
    assert shown.getvalue() == "a table\nprecaudit: said\nmore\n"


def test_the_hash_of_arrays_is_of_names_formats_shapes_and_values():
    x = np.zeros((2, 4), np.float32)
    each = [{"a": x}, {"b": x}, {"a": x.view(np.int32)}, {"a": x.reshape(4, 2)}, {"a": x + 1}, {"a": x, "b": x}]
    assert len({arrays_hash(one) for one in each}) == len(each)
    assert arrays_hash({"a": x, "b": x + 1}) == arrays_hash({"b": x + 1, "a": x})


def test_arrays_that_are_not_what_was_recorded_are_refused(tmp_path):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    arrays = Arrays(tmp_path / TENSORS)
    halves = tuple(Part((i, 0), x[i : i + 2]) for i in (0, 2))
    assert arrays.write([WrittenArray("0.0.taps/h", (4, 2), "float32", (2, 2), halves)], metadata=True) == x.nbytes
    digest = arrays_hash({"h": x})
    assert np.array_equal(stored_arrays(tmp_path, "tensors/0.0.taps", digest)["h"], x)
    with pytest.raises(UserError, match="was altered since it was recorded"):
        stored_arrays(tmp_path, "tensors/0.0.taps", "xxh3:0")
    for said, whole in ((digest, True), ("xxh3:0", False)):
        assert _is_whole(tmp_path, SimpleNamespace(hashes={"tensors/0.0.taps": said}), "tensors/0.0.taps") == whole
    with pytest.raises(UserError, match=r"0.0.taps/v is missing; the run is damaged"):
        arrays.read("0.0.taps/v")
    for path in (tmp_path / TENSORS / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"\x01" * 9)
    with pytest.raises(UserError, match="cannot be read"):
        arrays.read("0.0.taps/h")


def test_a_part_gives_what_is_wanted_of_it():
    """The second process's rows 4 to 7 of 8, of the second of three prompts."""
    held = np.arange(3 * 8 * 2).reshape(3, 8, 2)[1:, 4:]
    places = (((1, 0, 0), (2, 4, 2)), ((1, 4, 0), (2, 4, 2)))
    spread = Spread((3, 8, 2), np.dtype("int64"), places, (Part((1, 4, 0), held),))
    [part] = spread.written("x", [1, [2, 3, 4, 5, 7], range(2)]).parts
    assert part.start == (2, 0)
    assert part.values.tolist() == held[0, [0, 1, 3]].tolist()
    assert spread.written("x", [1, [1, 2], range(2)]).parts == ()
    assert spread.written("x", [0, [4], range(2)]).parts == ()


def test_a_run_that_was_cut_off_says_which_shards_are_missing(tmp_path):
    record = {
        "schema": 3, "id": "", "program": "", "code": "", "weights": "", "automatic": True, "cases": ["a"], "calls": 1,
        "points": [], "device": "cpu", "versions": {}, "command": "", "started": "", "processes": [[0, 1], [2, 3]],
    }  # fmt: skip
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(record))
    note_shard(tmp_path, 0, ["a"], 4)
    with pytest.raises(UserError, match=r"cut off .*\(shards of process 1 \(devices 2 to 3\) are missing of a\)"):
        open_program_run(tmp_path)


def test_a_database_is_kept_where_a_run_goes_on(tmp_path):
    """What is made again replaces it; a file of tensors that no batch has is deleted."""
    tensors = tmp_path / "tensors"
    tensors.mkdir()
    for name in ("steps.jsonl", "points.jsonl", f"tensors/{OCDBT}", "tensors/other"):
        (tmp_path / name).write_text("")
    trim(tmp_path, Continuation(None, (), frozenset()))
    assert {p.name for p in tensors.iterdir()} == {OCDBT, "other"}
    (tensors / OCDBT).unlink()
    trim(tmp_path, Continuation(None, (), frozenset()))
    assert not list(tensors.iterdir())


def test_a_run_goes_on_with_as_many_processes():
    names = dict.fromkeys(("device", "device_count", "mesh", "xla_flags"), 4)
    one, two = (SimpleNamespace(**names, processes=x, versions={}) for x in ((), ((0, 1), (2, 3))))
    assert list(_other_conditions(one, one)) == []
    assert list(_other_conditions(one, two)) == ["processes"]


@pytest.mark.parametrize(("code", "waits"), [(0, True), (2, False)])
def test_the_first_stays_for_a_slow_one_where_the_run_is_whole(code, waits, monkeypatch):
    """The other leaves after ten seconds: of a run that failed it is not waited for so long."""
    clock, ended = [0.0], []
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(processes.os, "_exit", ended.append)

    class Slow(Client):
        def key_value_dir_get(self, name):
            return super().key_value_dir_get(name) + ["1"] * (clock[0] >= 10)

    Hosts(0, 2, Slow()).leave(code)
    assert ended == [code]
    assert (clock[0] >= 10) == waits


def test_a_note_of_a_shard_is_in_a_bucket_after_what_it_is_of(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("precaudit.recording.runs.shards.commit", lambda _: order.append("commit"))
    monkeypatch.setattr("precaudit.recording.runs.shards.note_shard", lambda *_: order.append("note"))
    Shards(tmp_path, Hosts()).share("writing a", ["a"], 1)
    assert order == ["commit", "note", "commit"]


def test_of_a_bucket_the_first_process_reads_and_no_cache_s_folder_is_a_difference(tmp_path, monkeypatch):
    assert Shards(tmp_path, Hosts(0, 2)).readers == 2
    for module in ("hosts", "shards"):
        monkeypatch.setattr(f"precaudit.recording.runs.{module}.by_url", lambda x: x.replace(str(tmp_path), "gs://b/m"))
    assert Shards(tmp_path, Hosts(0, 2)).readers == 1
    assert processes._json({"the folder -o": str(tmp_path)}) == '{"the folder -o":"gs://b/m"}'
