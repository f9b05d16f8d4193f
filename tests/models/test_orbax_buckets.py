"""Orbax checkpoints in a bucket: gs:// read through Orbax, gcsfs and TensorStore from a server of the tests' own."""

import os
import subprocess
import sys

import orbax.checkpoint
import pytest
from etils import epath
from safetensors.numpy import load_file

from precaudit.models.checkpoints.orbax_files import bucket_listing
from tests.helpers.bucket_servers import Google, google_environment, serve
from tests.helpers.paths import FIXTURES

READ = """
import sys
import numpy as np
from safetensors.numpy import load_file
from precaudit.models.checkpoints import open_checkpoint
from precaudit.cli import run
opened = open_checkpoint(sys.argv[1])
for name, x in load_file(sys.argv[2]).items():
    np.testing.assert_array_equal(opened.tensors.read_tensor(name), x)
print(opened.hashes.sha256())
sys.exit(run(["models", sys.argv[1]]))
"""


@pytest.fixture
def bucket(tmp_path):
    """Return the folder a bucket's objects lie in, and the environment that finds its server."""
    root = tmp_path / "objects"
    root.mkdir()
    with serve(Google, root) as (url, _):
        yield root, os.environ | google_environment(url)


@pytest.mark.parametrize("change", ["name", "size", "time"])
def test_what_tells_a_checkpoint_in_a_bucket_from_another(tmp_path, change):
    folder = epath.Path(tmp_path)
    file = tmp_path / "a"
    file.write_bytes(b"1234")
    os.utime(file, (1, 1))
    before = bucket_listing(folder)
    if change == "size":
        file.write_bytes(b"12345")
        os.utime(file, (1, 1))
    elif change == "time":
        os.utime(file, (2, 2))
    else:
        file.rename(tmp_path / "b")
    assert bucket_listing(folder) != before


@pytest.mark.slow  # 7 s
def test_a_checkpoint_in_a_bucket_is_read(tmp_path, bucket):
    root, environment = bucket
    weights = FIXTURES / "llama-gqa" / "model.safetensors"
    orbax.checkpoint.PyTreeCheckpointer().save(root / "models" / "items", load_file(weights))
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / "llama-gqa" / "config.json").read_bytes())
    (folder / "names.toml").write_text('checkpoint = "gs://bucket/models/items"\n')

    def read():
        words = [sys.executable, "-c", READ, str(folder), str(weights)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)

    done = read()
    assert done.returncode == 0, done.stderr
    (root / "models" / "items" / "more").write_bytes(b"x")
    assert read().stdout.splitlines()[0] != done.stdout.splitlines()[0]


@pytest.mark.slow  # 45 s: gcsfs tries again six times
def test_a_bucket_that_is_not_reached_is_said_in_a_line(tmp_path):
    """Nothing listens at the server; the libraries log tracebacks, which nobody reads."""
    (tmp_path / "config.json").write_bytes((FIXTURES / "llama-gqa" / "config.json").read_bytes())
    (tmp_path / "names.toml").write_text('checkpoint = "gs://bucket/models/items"\n')
    words = [sys.executable, "-m", "precaudit", "models", str(tmp_path)]
    done = subprocess.run(
        words, env=os.environ | google_environment("http://127.0.0.1:1"), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("precaudit: gs://bucket/models/items: cannot be read")
