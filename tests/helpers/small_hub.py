"""A hub of Hugging Face on this machine: the calls that an upload makes, over HTTP, with real files kept in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests"


@dataclass
class SmallHub:
    """What the hub has.

    Args:
        url: its address.
        private: of each repository whether it is private.
        files: contents by repository and path.
        objects: contents of large files by their sha256.
        calls: method and path of every call.
        tokens: the authorisations that calls brought.
    """

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def commit(self, repo: str, body: bytes) -> None:
        own = self.files.setdefault(repo, {})
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                own[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                own[value["path"]] = self.objects[value["oid"]]

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and content of a call that may write."""
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.private[repo] = asked.get("visibility") == "private" or asked.get("private") is True
            return 200, {"url": f"{self.url}/{repo}"}
        if path.startswith("/lfs/"):
            self.objects[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            upload = [{**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}} for each in asked]
            return 200, {"transfer": "basic", "objects": upload}
        repo = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = {each: "lfs" if each.endswith(".safetensors") else "regular" for each in names}
            return 200, {"files": [{"path": k, "uploadMode": v, "shouldIgnore": False} for k, v in modes.items()]}
        if "/commit/" in path:
            self.commit(repo, body)
            return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'0' * 40}"}
        return 404, {"error": "no such call"}


def _make_handler(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def send(self, status: int, content: Any, code: str = "") -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(text)

        def handle_call(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            hub.calls.append(f"{self.command} {path}")
            brought = self.headers.get("Authorization", "")
            if not path.startswith("/lfs/"):  # a storage's address is signed and takes no token
                hub.tokens.add(brought)
                if brought != f"Bearer {TOKEN}":
                    self.send_response(401)
                    self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            if self.command == "GET":
                repo = "/".join(path.split("/")[3:5])
                if repo in hub.private:
                    self.send(200, {"id": repo, "private": hub.private[repo], "siblings": [], "tags": []})
                else:
                    self.send(404, {"error": "Repository not found"}, "RepoNotFound")
                return
            self.send(*hub.answer(path, body))

        do_GET = do_POST = do_PUT = handle_call  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def run_small_hub() -> Iterator[SmallHub]:
    """Serve an empty hub on a free port of this machine."""
    hub = SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
