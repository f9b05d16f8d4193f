"""Folders here that follow buckets: what is brought, what is written, in which order, and what a failure leaves."""

import errno
import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save

from precaudit import mirrors as following
from precaudit.buckets import Bucket, is_url
from precaudit.cli import run
from precaudit.cli._urls import paths_for
from precaudit.errors import UserError
from precaudit.mirrors import bring, commit, local_path, mirror_of, mirrors
from precaudit.models.checkpoints.safetensors_files import SafetensorsFiles
from precaudit.recording.runs.arrays import Arrays, Part, WrittenArray


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Return fsspec's memory, empty, with a cache folder of one's own."""
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(following, "_MIRRORS", {})
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def elsewhere(monkeypatch, tmp_path):
    """Have another machine's cache from here on."""
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(following, "_MIRRORS", {})


def files(fs, folder="/b"):
    return {name.removeprefix("/b/"): fs.cat_file(name).decode() for name in fs.find(folder)}


def failing(fs, monkeypatch, names, error):
    """Have writes of these names fail; return the names that were written before."""
    wrote, put = [], type(fs).put_file

    def put_file(self, local, remote, **given):
        if any(remote.endswith(name) for name in names):
            raise error
        wrote.append(remote.removeprefix("/b/"))
        return put(self, local, remote, **given)

    monkeypatch.setattr(type(fs), "put_file", put_file)
    return wrote


def test_what_is_there_is_brought_and_what_changes_is_written(memory):
    memory.pipe_file("/b/m/run.json", b"1")
    memory.pipe_file("/b/m/tensors/a", b"22")
    folder = local_path("memory://b/m")
    assert (folder / "tensors" / "a").read_bytes() == b"22"
    (folder / "errors.jsonl").write_text("e")
    (folder / "tensors" / "a").unlink()
    commit(folder)
    assert files(memory) == {"m/run.json": "1", "m/errors.jsonl": "e"}
    memory.pipe_file("/b/m/run.json", b"other")
    assert (local_path("memory://b/m") / "run.json").read_text() == "other"


def test_what_makes_a_run_valid_is_written_last(memory, monkeypatch):
    wrote = failing(memory, monkeypatch, (), None)
    folder = local_path("memory://b/m")
    names = ("run.json", "compare.json", "batches.jsonl", "points.jsonl", "tensors/manifest.ocdbt", "tensors/z")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    commit(folder)
    assert sorted(wrote[:2]) == ["m/points.jsonl", "m/tensors/z"]
    assert wrote[2:] == ["m/tensors/manifest.ocdbt", "m/batches.jsonl", "m/compare.json", "m/run.json"]


@pytest.mark.parametrize("error", [PermissionError("no"), OSError("503 try later")], ids=["rights", "half-way"])
def test_a_write_that_fails_leaves_what_was_there_and_is_done_when_the_url_is_used_again(memory, monkeypatch, error):
    monkeypatch.setattr("precaudit.buckets.WAITS", (0, 0))
    memory.pipe_file("/b/m/run.json", b"before")
    folder = local_path("memory://b/m")
    (folder / "points.jsonl").write_text("p")
    (folder / "run.json").write_text("after")
    with monkeypatch.context() as patch:
        failing(memory, patch, ("run.json",), error)
        with pytest.raises(UserError, match=r"^memory://b/m: cannot be written") as said:
            commit(folder)
    assert len(str(said.value).splitlines()) == 1
    assert files(memory)["m/run.json"] == "before"
    monkeypatch.setattr(following, "_MIRRORS", {})  # another process
    local_path("memory://b/m")
    assert files(memory) == {"m/run.json": "after", "m/points.jsonl": "p"}


def test_what_failed_is_not_written_over_what_another_wrote_since(memory, monkeypatch):
    memory.pipe_file("/b/m/run.json", b"before")
    folder = local_path("memory://b/m")
    (folder / "run.json").write_text("mine")
    monkeypatch.setattr(following, "_MIRRORS", {})
    memory.pipe_file("/b/m/run.json", b"theirs")
    assert (local_path("memory://b/m") / "run.json").read_text() == "theirs"
    assert files(memory) == {"m/run.json": "theirs"}


def test_what_fails_for_the_moment_is_asked_for_again(memory, monkeypatch):
    monkeypatch.setattr("precaudit.buckets.WAITS", (0, 0))
    errors = [OSError("503"), TimeoutError("slow")]
    put = type(memory).put_file

    def put_file(self, *given, **named):
        if errors:
            raise errors.pop()
        return put(self, *given, **named)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    folder = local_path("memory://b/m")
    folder.mkdir(parents=True)
    (folder / "a").write_text("x")
    commit(folder)
    assert files(memory) == {"m/a": "x"}


def test_a_cache_that_was_cleared_deletes_nothing_in_the_bucket(memory, monkeypatch):
    memory.pipe_file("/b/m/run.json", b"1")
    memory.pipe_file("/b/m/tensors/a", b"2")
    folder = local_path("memory://b/m")
    shutil.rmtree(folder / "tensors")
    monkeypatch.setattr(following, "_MIRRORS", {})
    assert (local_path("memory://b/m") / "tensors" / "a").read_text() == "2"
    shutil.rmtree(folder)
    assert (local_path("memory://b/m") / "run.json").read_text() == "1"
    assert files(memory) == {"m/run.json": "1", "m/tensors/a": "2"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a//b", "C:evil", "a\\b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(memory, tmp_path, monkeypatch, name):
    about = {"name": f"/b/m/{name}", "size": 1, "type": "file", "created": 1}
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: {about["name"]: about})
    memory.pipe_file("/b/m/run.json", b"1")
    with pytest.raises(UserError, match="no name of a file here"):
        local_path("memory://b/m")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_tensor_is_read_by_its_range_once(memory, monkeypatch):
    a, b = np.arange(40_000, dtype=np.float32), np.ones(40_000, np.float32)

    memory.pipe_file("/b/m/x.safetensors", save({"a": a, "b": b}))
    monkeypatch.setattr("precaudit.mirrors.BLOCK", 1000)
    asked, cat = [], type(memory).cat_file

    def cat_file(self, path, start=None, end=None, **given):
        asked.append((start, end))
        return cat(self, path, start=start, end=end, **given)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    path = local_path("memory://b/m") / "x.safetensors"
    assert path.stat().st_blocks * 512 < path.stat().st_size
    opened = SafetensorsFiles.open([path])
    np.testing.assert_array_equal(opened.read_tensor("b"), b)
    assert sum(end - start for start, end in asked) < 160_000 + (1 << 16) + 1000
    many = len(asked)
    monkeypatch.setattr(following, "_MIRRORS", {})  # another process
    np.testing.assert_array_equal(SafetensorsFiles.open([local_path("memory://b/m/") / path.name]).read_tensor("b"), b)
    assert len(asked) == many
    np.testing.assert_array_equal(SafetensorsFiles.open([path]).read_tensor("a"), a)


def test_a_file_that_changed_is_read_anew(memory):

    memory.pipe_file("/b/x.safetensors", save({"a": np.zeros(9)}))
    path = local_path("memory://b/x.safetensors")
    bring(path)
    memory.pipe_file("/b/x.safetensors", save({"a": np.ones(9)}))
    assert local_path("memory://b/x.safetensors") == path
    bring(path)
    assert path.read_bytes() == save({"a": np.ones(9)})


def test_a_bucket_of_a_package_that_is_not_installed_names_it(monkeypatch):
    def missing(protocol):
        raise ImportError(f"Install what reads {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UserError, match=r"s3:// is not installed: pip install 'precaudit\[s3\]'"):
        Bucket("s3://b/x").list_files()
    with pytest.raises(UserError, match="abfs:// is not installed: Install what reads abfs"):
        Bucket("abfs://b/x").list_files()


def test_only_urls_of_buckets_become_paths(memory):
    memory.pipe_file("/b/p.jsonl", b"{}")
    words = ["compare", "--scheduler", "tcp://host:1", "--text", "s3://b/x", "runs/m", "--text=gs://b"]
    assert paths_for(words) == words
    assert paths_for(["watch", "s.py", "s3://b"]) == ["watch", "s.py", "s3://b"]
    assert not is_url("FILE.py:NAME")
    assert paths_for(["gate", "file:///tmp/m"]) == ["gate", "/tmp/m"]
    with pytest.raises(UserError, match=r"^s33://b/m: nothing opens s33://; did you mean 's3'\?$"):
        paths_for(["gate", "s33://b/m"])
    path, option = paths_for(["memory://b/p.jsonl", "--prompts=memory://b/p.jsonl"])
    assert Path(path).read_text() == "{}"
    assert option == f"--prompts={path}"


def test_clearing_the_cache_keeps_what_a_bucket_does_not_have(memory, capsys):
    memory.pipe_file("/b/m/run.json", b"1")
    memory.pipe_file("/b/other/run.json", b"1")
    folder, other = local_path("memory://b/m"), local_path("memory://b/other")
    (folder / "errors.jsonl").write_text("e")
    assert run(["doctor", "--clear", "buckets"]) == 2
    assert "1 could not be deleted, first memory://b/m/errors.jsonl lacks it" in capsys.readouterr().out
    assert not other.exists()
    assert folder.exists()
    commit(folder)
    assert run(["doctor", "--clear", "buckets"]) == 0
    assert not folder.exists()
    assert files(memory) == {"m/run.json": "1", "m/errors.jsonl": "e", "other/run.json": "1"}


def test_what_another_process_deletes_here_is_not_deleted_in_the_bucket(memory, monkeypatch):
    memory.pipe_file("/b/m/run.json", b"1")
    memory.pipe_file("/b/m/a", b"1")
    folder = local_path("memory://b/m")
    monkeypatch.setattr(following, "_MIRRORS", {})
    (folder / "a").unlink()
    (folder / "new").write_text("n")
    commit(folder)
    assert files(memory) == {"m/run.json": "1", "m/a": "1", "m/new": "n"}
    shutil.rmtree(mirrors())
    commit(folder)
    assert files(memory) == {"m/run.json": "1", "m/a": "1", "m/new": "n"}


def test_weights_that_nobody_reads_here_stay_where_they_are(memory):
    for name in ("config.json", "pytorch_model.bin", "original/consolidated.00.pth"):
        memory.pipe_file(f"/b/m/{name}", b"1")
    folder = local_path("memory://b/m")
    assert [p.name for p in folder.rglob("*")] == ["config.json"]
    (folder / "config.json").unlink()
    commit(folder)
    assert files(memory) == {"m/pytorch_model.bin": "1", "m/original/consolidated.00.pth": "1"}


def test_a_disk_that_is_full_is_said_in_a_line(memory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    memory.pipe_file("/b/m/x.safetensors", save({"a": np.zeros(9)}))
    path = local_path("memory://b/m") / "x.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("precaudit.mirrors.os.pwrite", full)
        with pytest.raises(UserError, match=r"^memory://b/m/x.safetensors: cannot be kept here: No space left"):
            bring(path)
    bring(path)
    assert path.read_bytes() == save({"a": np.zeros(9)})
    memory.pipe_file("/b/m/large", b"1" * 100)
    monkeypatch.setattr("precaudit.buckets.shutil.disk_usage", lambda _: type("Usage", (), {"free": 9})())
    with pytest.raises(UserError, match=r"are to be brought here, and the cache's disk has"):
        local_path("memory://b/m")


def test_bytes_that_are_cut_off_are_not_taken(memory, monkeypatch):
    memory.pipe_file("/b/x.safetensors", save({"a": np.zeros(9)}))
    path = local_path("memory://b/x.safetensors")
    cat = type(memory).cat_file
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "cat_file", lambda *given, **named: cat(*given, **named)[:-1])
        with pytest.raises(UserError, match=r"^memory://b/x.safetensors: gave 135 bytes of 136; it was cut off, or"):
            bring(path)
    bring(path)
    assert path.read_bytes() == save({"a": np.zeros(9)})


def test_a_database_is_brought_once_it_is_read_and_its_manifest_is_written_last(memory, tmp_path, monkeypatch):
    wrote, x = failing(memory, monkeypatch, (), None), np.arange(8.0)
    folder = local_path("memory://b/m")
    Arrays(folder / "tensors").write([WrittenArray("a/q", (8,), "float64", (8,), (Part((0,), x),))], metadata=True)
    commit(folder)
    assert wrote[-1] == "m/tensors/manifest.ocdbt"
    elsewhere(monkeypatch, tmp_path)
    folder = local_path("memory://b/m")
    [data] = (folder / "tensors" / "d").iterdir()
    assert data.stat().st_blocks == 0
    assert np.array_equal(Arrays(folder / "tensors").read("a/q"), x)
    assert data.stat().st_blocks > 0
    commit(folder)
    assert len(wrote) == 2


def test_a_folder_beside_a_mirror_is_none(memory):
    memory.pipe_file("/b/m/run.json", b"1")
    folder = local_path("memory://b/m")
    beside = folder.with_name("m-repeat")
    beside.mkdir()
    assert mirror_of(beside) is None
    commit(beside)
    assert files(memory) == {"m/run.json": "1"}


def test_a_mirror_is_known_to_another_process_by_its_path(memory, monkeypatch):
    memory.pipe_file("/b/m/run.json", b"1")
    folder = local_path("memory://b/m")
    monkeypatch.setattr(following, "_MIRRORS", {})
    found = mirror_of(folder / "run.json")
    assert found is not None
    assert found.state.url == "memory://b/m"
    assert json.loads((folder.parent / "state.json").read_text())["url"] == "memory://b/m"


def test_a_command_beside_one_that_writes_takes_nothing_from_it(memory, monkeypatch):
    folder = local_path("memory://b/m")
    folder.mkdir(parents=True)
    (folder / "a").write_text("1")
    commit(folder)
    writing = mirror_of(folder)
    (folder / "b").write_text("2")
    monkeypatch.setattr(following, "_MIRRORS", {})  # another process looks
    local_path("memory://b/m")
    assert {p.name for p in folder.iterdir()} == {"a", "b"}
    (folder / "c").write_text("3")
    writing.commit()
    local_path("memory://b/m")
    assert files(memory) == {"m/a": "1", "m/b": "2", "m/c": "3"}
    assert {p.name for p in folder.iterdir()} == {"a", "b", "c"}
