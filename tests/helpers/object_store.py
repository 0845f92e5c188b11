"""A real S3 server on localhost, and a proxy before it that refuses, fails, tells another time, or is one of gs://."""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import MemoryStore
from werkzeug.serving import make_server

from domext_ray import storage
from domext_ray.storage import Bucket

BUCKET, MEMORY = "s3://runs", "s3://memory"
GS_BUCKET = "gs://runs"
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=none"}
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def serve_objects() -> Iterator[str]:
    """Serve a bucket; yields the server's address. One request at a time: moto checks a condition, then writes."""
    app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ: Any, start: Any) -> list[bytes]:
        with turn:
            return list(app(environ, start))

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, answer, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    make_bucket(address, "runs")
    yield address
    server.shutdown()


def use_objects(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process, and those that it starts, at a server."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    storage._open_backend.cache_clear()


def use_gs(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process, and those that it starts, at a proxy for gs://."""
    account = {
        "gcs_base_url": address,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    storage._open_backend.cache_clear()


def make_bucket(address: str, name: str) -> None:
    """Make a bucket, unless it is there."""
    urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT")).read()


def put_object(address: str, key: str, content: bytes = b"some words of a line\n", bucket: str = "runs") -> None:
    """Put an object under any key, also one that `Place` refuses: a console's empty FOLDER/, or a//b."""
    url = f"{address}/{bucket}/{urllib.parse.quote(key)}"
    kind = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, content, kind, method="PUT")).read()


class MemoryBucket(Bucket):
    """A bucket of this process, asked as others are."""

    def __init__(self) -> None:
        self.url, self.is_silent, self.tidy_due, self.store = MEMORY, False, 0.0, MemoryStore()


def use_memory(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Make `MEMORY` a bucket of this process, and return it."""
    made, real = MemoryBucket(), storage._open_backend
    monkeypatch.setattr(storage, "_open_backend", lambda root: made if root == MEMORY else real(root))
    return made


class Proxy:
    """Stands before a server; what it does to a request is settled by its attributes, at any time.

    Args:
        address: the server's.
        is_gs: who asks is a client of gs://, which has its own names for conditions, and whose answer is 404 where
            what is to be deleted is not there.
    """

    def __init__(self, address: str, is_gs: bool = False) -> None:
        self.host = address.removeprefix("http://")
        self.silent_after = -1  # 503 for ever, once so many more requests were answered; below 0: never
        self.refused: str = ""  # a method that is answered with 403
        self.silent_until = 0.0  # 503 until then, as time.monotonic() has it
        self.shift = 0.0  # seconds that the server's clock is ahead
        self.loses_answers = 0  # how many of what was put is answered with 503
        self.requests = list[str]()  # all that it was asked
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.requests.append(f"{self.command} {self.path}")
                proxy.silent_after -= proxy.silent_after > 0
                if time.monotonic() < proxy.silent_until or proxy.silent_after == 0:
                    self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                elif self.command == proxy.refused:
                    self._answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
                else:
                    connection = http.client.HTTPConnection(proxy.host, timeout=60)
                    headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                    headers = {**headers, "Host": proxy.host}
                    if is_gs:
                        wanted = headers.pop("x-goog-if-generation-match", "")
                        headers.pop("authorization", "")
                        same = {"0": {"If-None-Match": "*"}, "": {}}.get(
                            wanted, {"If-Match": f'"{int(wanted or 0):032x}"'}
                        )
                        headers |= SIGNED | same
                        connection.request("HEAD", self.path, headers={"Host": proxy.host, **SIGNED})
                        known = connection.getresponse()
                        known.read()
                        if self.command == "DELETE" and known.status == 404:
                            return self._answer(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    content = answer.read()
                    if proxy.loses_answers and self.command == "PUT":
                        proxy.loses_answers -= 1
                        self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                        return
                    told = dict(answer.getheaders())
                    if is_gs and "ETag" in told:  # its generation is another spelling of that
                        told["x-goog-generation"] = str(int(told["ETag"].strip('"'), 16))
                    self._answer(answer.status, told, content)
                    connection.close()

            def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() in ("date", "last-modified") and proxy.shift:
                        moment = email.utils.parsedate_to_datetime(value).timestamp() + proxy.shift
                        value = email.utils.formatdate(moment, usegmt=True)
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = headers.get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def count_seconds(text: str) -> int:
    """The number of seconds that a sentence names."""
    found = re.search(r"(\d+) s\b", text)
    assert found is not None
    return int(found[1])
