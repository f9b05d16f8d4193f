"""Servers of the tests' own that speak what a bucket speaks: GCS's JSON, and S3's XML.

A bucket's objects are files of a folder. ``Faults`` has requests refused or fail, as a bucket may. No real bucket was
ever read here. https://cloud.google.com/storage/docs/json_api, https://docs.aws.amazon.com/AmazonS3/latest/API
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Faults:
    """``after``: how many writes succeed, None for all; ``code``: what the others get; ``times``: how many fail.

    ``reads_refused``: every read is answered 403. ``closed``: so is a write to a key that holds it.
    ``asked``: what was asked for, (method, key, range).
    """

    after: int | None = None
    code: int = 403
    times: int = 1 << 30
    reads_refused: bool = False
    closed: str = ""
    writes: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def refuse(self, method: str, key: str) -> int | None:
        """Return what a request fails with; None for one that does not."""
        if method in ("GET", "HEAD"):
            return 403 if self.reads_refused else None
        if self.closed and self.closed in key:
            return 403
        self.writes += 1
        if self.after is None or self.writes <= self.after or self.times == 0:
            return None
        self.times -= 1
        return self.code


class Objects(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    faults: Faults

    def log_message(self, *args):
        pass

    def answer(self, body=b"", code=200, size=None, **headers):
        self.send_response(code)
        told = {"Content-Length": str(len(body) if size is None else size)} | headers
        for name, x in told.items():
            self.send_header(name.replace("_", "-"), x)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self, key):
        self.faults.asked.append((self.command, key, self.headers.get("Range", "")))
        code = self.faults.refuse(self.command, key)
        if code is not None:
            self.body()
            self.answer(json.dumps({"error": {"code": code, "message": "no"}}).encode(), code)
        return code is not None

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def query(self):
        asked = urlsplit(self.path)
        return unquote(asked.path), dict(parse_qsl(asked.query, keep_blank_values=True))

    def listed(self, prefix, delimiter):
        found, folders = [], set()
        for p in sorted(p for p in self.root.rglob("*") if p.is_file()):
            name = str(p.relative_to(self.root))
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and "/" in rest:
                folders.add(prefix + rest.partition("/")[0] + "/")
            elif name.startswith(prefix):
                found.append(p)
        return found, sorted(folders)

    def store(self, key, data):
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def media(self, path, **headers):
        total = path.stat().st_size
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        a = int(first) if first else max(0, total - int(last))
        b = min(int(last), total - 1) if first and last else total - 1
        where = f"bytes {a}-{b}/{total}"
        with path.open("rb") as file:
            file.seek(a)
            part = file.read(b + 1 - a)
        self.answer(part, 206 if "Range" in self.headers else 200, Content_Range=where, **headers)


def generation(path):
    """Return a number that is another when a file was written anew."""
    stat = path.stat()
    return str(stat.st_mtime_ns + stat.st_size)


class Google(Objects):
    pending: ClassVar[dict[str, bytes]] = {}

    def about(self, path):
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": str(path.relative_to(self.root)),
            "size": str(path.stat().st_size),
            "generation": generation(path),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00Z",
        }

    def do_GET(self):
        path, query = self.query()
        key = path.partition("/o")[2].lstrip("/")
        file = self.root / key
        if self.refused(key):
            return
        if "/b/bucket" not in path:
            self.answer(b'{"error": {"code": 404, "message": "no such bucket"}}', 404)
        elif not key:
            found, folders = self.listed(query.get("prefix", ""), query.get("delimiter"))
            self.answer(json.dumps({"items": [self.about(p) for p in found], "prefixes": folders}).encode())
        elif not file.is_file():
            self.answer(b'{"error": {"code": 404, "message": "no such object"}}', 404)
        elif query.get("alt") != "media":
            self.answer(json.dumps(self.about(file)).encode())
        else:
            self.media(file, x_goog_generation=generation(file))

    def do_POST(self):
        """Take an upload: metadata and bytes between boundaries; of a large file one request begins, others bring."""
        if self.refused("upload"):
            return
        path, query = self.query()
        if "/b/bucket" not in path:
            self.body()
            self.answer(b'{"error": {"code": 404, "message": "no such bucket"}}', 404)
            return
        if query.get("uploadType") == "resumable":
            key = json.loads(self.body())["name"]
            self.pending[key] = b""
            where = f"http://{self.headers['Host']}{path}?{urlencode({'upload_id': key})}"
            self.answer(b"{}", Location=where)
            return
        if key := query.get("upload_id"):
            self.pending[key] += self.body()
            have, total = len(self.pending[key]), int(self.headers["Content-Range"].rpartition("/")[2])
            if have < total:
                self.answer(code=308, Range=f"bytes=0-{have - 1}")
            else:
                self.answer(json.dumps(self.about(self.store(key, self.pending.pop(key)))).encode())
            return
        boundary = self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
        parts = self.body().split(b"--" + boundary)
        end = b"\r\n" if parts[1].startswith(b"\r\n") else b"\n"
        about, data = (part.partition(end + end)[2].removesuffix(end) for part in parts[1:3])
        key = json.loads(about)["name"]
        self.answer(json.dumps(self.about(self.store(key, data))).encode())

    def do_DELETE(self):
        path, _ = self.query()
        key = path.partition("/o/")[2]
        if self.refused(key):
            return
        (self.root / key).unlink(missing_ok=True)
        self.answer(code=204)


class Amazon(Objects):
    """S3 with the bucket's name first in the path."""

    def do_GET(self):
        path, query = self.query()
        bucket, _, key = path.strip("/").partition("/")
        if self.refused(key):
            return
        if bucket != "bucket":
            self.error(404, "NoSuchBucket")
        elif not key:
            found, folders = self.listed(query.get("prefix", ""), query.get("delimiter"))
            every = "".join(
                f"<Contents><Key>{escape(str(p.relative_to(self.root)))}</Key><Size>{p.stat().st_size}</Size>"
                f'<ETag>"{generation(p)}"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
                for p in found
            )
            every += "".join(f"<CommonPrefixes><Prefix>{escape(x)}</Prefix></CommonPrefixes>" for x in folders)
            count = len(found) + len(folders)
            self.xml(f"<ListBucketResult><KeyCount>{count}</KeyCount>{every}</ListBucketResult>")
        elif not (file := self.root / key).is_file():
            self.error(404, "NoSuchKey")
        else:
            when = formatdate(1767225600, usegmt=True)
            self.media(file, ETag=f'"{generation(file)}"', Last_Modified=when)

    do_HEAD = do_GET

    def do_PUT(self):
        bucket, _, key = self.query()[0].strip("/").partition("/")
        if self.refused(key):
            return
        data = self.body()
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            data = unframed(data)
        if bucket != "bucket":
            self.error(404, "NoSuchBucket")
        else:
            self.answer(ETag=f'"{generation(self.store(key, data))}"')

    def do_DELETE(self):
        key = self.query()[0].strip("/").partition("/")[2]
        if self.refused(key):
            return
        (self.root / key).unlink(missing_ok=True)
        self.answer(code=204)

    def xml(self, text, code=200):
        self.answer(f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), code, Content_Type="application/xml")

    def error(self, code, name):
        self.xml(f"<Error><Code>{name}</Code><Message>{name}</Message></Error>", code)


def unframed(data):
    """Return the bytes of chunks whose sizes stand before them, as newer clients send what they sum while they send."""
    found = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line.partition(b";")[0] or b"0", 16)
        if not size:
            break
        found, data = found + data[:size], data[size + 2 :]
    return found


class Server(ThreadingHTTPServer):
    def handle_error(self, request, address):
        """Clients close connections that they need no more."""


@contextmanager
def serve(kind, root):
    """Serve a folder; yield the URL of the server and its faults."""
    faults = Faults()
    server = Server(("127.0.0.1", 0), type("OfFolder", (kind,), {"root": root, "faults": faults}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()


def google_environment(url):
    """Return the variables by which gcsfs and TensorStore find the server, and no credentials."""
    nobody = dict.fromkeys(("FSSPEC_GCS_TOKEN", "FSSPEC_GS_TOKEN"), "anon")
    return nobody | {
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks a control service over gRPC what kind of bucket it is
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
    }


def amazon_environment(url):
    """Return the variables by which s3fs finds the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
