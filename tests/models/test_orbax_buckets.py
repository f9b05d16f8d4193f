"""Orbax checkpoints in a bucket: gs:// read through Orbax, gcsfs and TensorStore from a server that speaks GCS's JSON.

The server is this test's own (objects, listings and ranges of https://cloud.google.com/storage/docs/json_api); no real
bucket was ever read here.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import orbax.checkpoint
import pytest
from etils import epath
from safetensors.numpy import load_file

from precaudit.models.checkpoints.orbax_files import bucket_listing
from tests.helpers.paths import FIXTURES

READ = """
import sys
from unittest import mock
import numpy as np
from safetensors.numpy import load_file
from precaudit.models.checkpoints import open_checkpoint
from precaudit.cli import run
try:  # newer ones ask a control service, over gRPC, what kind of bucket it is; here is none
    from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem
except ImportError:
    pass
else:
    unknown = mock.AsyncMock(return_value=BucketType.UNKNOWN)
    mock.patch.object(ExtendedGcsFileSystem, "_get_bucket_type", unknown).start()
opened = open_checkpoint(sys.argv[1])
for name, x in load_file(sys.argv[2]).items():
    np.testing.assert_array_equal(opened.tensors.read(name), x)
print(opened.hashes.sha256())
sys.exit(run(["models", sys.argv[1]]))
"""


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *args):
        pass

    def answer(self, body, code=200, **headers):
        self.send_response(code)
        for name, x in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), x)
        self.end_headers()
        self.wfile.write(body)

    def about(self, path):
        stat = path.stat()
        return {
            "kind": "storage#object", "bucket": "bucket", "name": str(path.relative_to(self.root)),
            "size": str(stat.st_size), "generation": "1", "metageneration": "1", "updated": "2026-01-01T00:00:00Z",
        }  # fmt: skip

    def do_GET(self):
        asked = urlsplit(self.path)
        query = dict(parse_qsl(asked.query))
        key = unquote(asked.path.partition("/o")[2].lstrip("/"))
        path = self.root / key
        if not key:
            start, found, folders = query.get("prefix", ""), [], set()
            for p in sorted(p for p in self.root.rglob("*") if p.is_file()):
                name = str(p.relative_to(self.root))
                rest = name.removeprefix(start)
                if name.startswith(start) and "delimiter" in query and "/" in rest:
                    folders.add(start + rest.partition("/")[0] + "/")
                elif name.startswith(start):
                    found.append(self.about(p))
            self.answer(json.dumps({"items": found, "prefixes": sorted(folders)}).encode())
        elif not path.is_file():
            self.answer(b'{"error": {"code": 404, "message": "no such object"}}', 404)
        elif query.get("alt") != "media":
            self.answer(json.dumps(self.about(path)).encode())
        else:
            self.media(path.read_bytes())

    def media(self, data):
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        a = int(first) if first else max(0, len(data) - int(last))
        b = min(int(last), len(data) - 1) if first and last else len(data) - 1
        where = f"bytes {a}-{b}/{len(data)}"
        self.answer(data[a : b + 1], 206 if "Range" in self.headers else 200, Content_Range=where,
                    x_goog_generation="1")  # fmt: skip


@pytest.fixture
def bucket(tmp_path):
    """Return the folder a bucket's objects lie in, and the environment that finds its server."""
    root = tmp_path / "objects"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfFolder", (Bucket,), {"root": root}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    nobody = {
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        "NO_GCE_CHECK": "true",
        "FSSPEC_GCS_TOKEN": "anon",
        "FSSPEC_GS_TOKEN": "anon",
    }
    yield root, os.environ | nobody | {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
    server.shutdown()
    server.server_close()


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


@pytest.mark.slow  # 18 s
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
    nobody = {"GCE_METADATA_ROOT": "127.0.0.1:1", "NO_GCE_CHECK": "true", "FSSPEC_GCS_TOKEN": "anon",
              "FSSPEC_GS_TOKEN": "anon", "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}  # fmt: skip
    words = [sys.executable, "-m", "precaudit", "models", str(tmp_path)]
    done = subprocess.run(words, env=os.environ | nobody, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("precaudit: gs://bucket/models/items: cannot be read")
