"""A hub of Hugging Face on this machine that has no file: it says what there is, and keeps what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OWN = "/api/agent-harnesses"
"""What the client asks for itself, once a day."""


@dataclass
class ModelHub:
    """The hub.

    Args:
        server: that answers.
        known: paths of the API that it has.
        asked: method and path of every call.
    """

    server: ThreadingHTTPServer
    known: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        """Answer no more."""
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serve_names() -> Iterator[ModelHub]:
    """Serve a hub until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != OWN:
                hub.asked.append(f"{self.command} {self.path}")
            body = b'{"id": "known", "siblings": []}' if self.path in hub.known else b""
            self.send_response(200 if body or self.path == "/" else 401)
            self.send_header("X-Error-Code", "" if body else "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    hub = ModelHub(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    threading.Thread(target=hub.server.serve_forever, args=(0.01,), daemon=True).start()
    yield hub
    hub.close()
