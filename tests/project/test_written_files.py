"""Files written whole, and what is no file: links, devices, FIFOs, standard output.

Devices are reached by links and nodes in the test's own folder: what replaced them would replace none of the machine's.
"""

import errno
import os
import subprocess
import sys
import threading

import pytest

from precaudit.cli import run
from precaudit.recording.runs.folders import prepare_folder
from precaudit.schema.records.lines import write_lines
from precaudit.writing import PART, whole, write_whole


def left(folder):
    return [p for p in folder.iterdir() if p.name.endswith(PART)]


def halves(path):
    with whole(path) as f:
        f.write(b"half")
        raise ZeroDivisionError


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_it_leads_to_is_replaced(tmp_path, there):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.txt", tmp_path / "link"
    link.symlink_to("real/a.txt")
    if there:
        target.write_text("before")
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert not left(target.parent)
    with pytest.raises(ZeroDivisionError):
        halves(link)
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert not left(target.parent)


def test_a_link_to_itself_is_refused_and_stays(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(OSError, match="link") as found:
        write_whole(link, "x")
    assert found.value.errno == errno.ELOOP
    assert found.value.filename == str(link)
    assert link.is_symlink()


def test_a_fifo_is_written_into(tmp_path):
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_whole(fifo, "text")
    reader.join(10)
    assert got == [b"text"]
    assert fifo.is_fifo()


def test_a_device_is_written_into_and_stays(tmp_path):
    """Under a link, which a test without the right to make devices can make."""
    null, full = tmp_path / "null", tmp_path / "full"
    null.symlink_to("/dev/null")
    write_whole(null, "x")
    assert os.readlink(null) == "/dev/null"
    assert null.is_char_device()
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as found:
        write_whole(full, "x")
    assert found.value.filename == str(full)
    assert full.is_char_device()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="making a device needs root")
def test_a_device_node_stays(tmp_path):
    node = tmp_path / "null"
    os.mknod(node, 0o600 | 0o020000, os.makedev(1, 3))
    write_whole(node, "x")
    assert node.is_char_device()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_in_a_folder_of_ours_what_is_no_file_is_refused(tmp_path, kind):
    """A run may be somebody else's: its report.md may lead anywhere."""
    path, other = tmp_path / "errors.jsonl", tmp_path / "other"
    other.write_text("theirs")
    path.symlink_to(other) if kind == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match="a link or a device") as found:
        write_lines(path, [])
    assert found.value.filename == str(path)
    assert other.read_text() == "theirs"


STREAM = "import sys; from pathlib import Path; from precaudit.writing import write_whole; print('before'); "
STREAM += "write_whole(Path(sys.argv[1]), 'written\\n'); print('after')"


@pytest.mark.parametrize("path", ["stdout", "/proc/self/fd/1", "out.txt"])
@pytest.mark.parametrize("to", ["file", "pipe"])
def test_standard_output_keeps_what_was_and_what_will_be_printed(tmp_path, path, to):
    if to == "pipe" and path == "out.txt":
        return
    out = tmp_path / "out.txt"
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-c", STREAM, str(tmp_path / path)]
    with out.open("wb") as f:
        done = subprocess.run(command, stdout=f if to == "file" else subprocess.PIPE, check=True)
    told = out.read_text() if to == "file" else done.stdout.decode()
    assert told == "before\nwritten\nafter\n"


def test_a_run_takes_the_place_of_the_one_a_link_leads_to(tmp_path):
    real, link = tmp_path / "real", tmp_path / "latest"
    real.mkdir()
    (real / "tensors").mkdir()
    link.symlink_to("real")
    prepare_folder(link, force=True)
    assert link.is_symlink()
    assert real.is_dir()
    assert not list(real.iterdir())
    assert not left(tmp_path)
    link.unlink()
    link.symlink_to("not-yet")
    prepare_folder(link, force=False)
    assert (tmp_path / "not-yet").is_dir()


def test_a_device_takes_what_a_command_writes(tmp_path):
    records = tmp_path / "errors.jsonl"
    records.write_text("")
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    assert run(["gate", str(records), "--junit", str(null), "--markdown", str(null)]) == 3
    assert os.readlink(null) == "/dev/null"
