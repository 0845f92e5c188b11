"""A hub of Hugging Face on this machine: the calls that an upload makes, over HTTP, with real files kept in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
            upload = [{**entry, "actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}} for entry in asked]
            return 200, {"transfer": "basic", "objects": upload}
        repo = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return 200, {"files": [{"path": k, "uploadMode": v, "shouldIgnore": False} for k, v in modes.items()]}
        if "/commit/" in path:
            self.commit(repo, body)
            return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'0' * 40}"}
        return 404, {"error": "no such call"}

    async def handle(self, request: Request) -> Response:
        path, body, brought = request.url.path, await request.body(), request.headers.get("Authorization", "")
        self.calls.append(f"{request.method} {path}")
        if not path.startswith("/lfs/"):  # a storage's address is signed and takes no token
            self.tokens.add(brought)
            if brought != f"Bearer {TOKEN}":
                return Response(status_code=401, headers={"X-Error-Message": "Invalid credentials in Authorization"})
        if request.method == "GET":
            repo = "/".join(path.split("/")[3:5])
            if repo not in self.private:
                return JSONResponse({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return JSONResponse({"id": repo, "private": self.private[repo], "siblings": [], "tags": []})
        status, content = self.answer(path, body)
        return JSONResponse(content, status)


@contextlib.contextmanager
def run_small_hub() -> Iterator[SmallHub]:
    """Serve an empty hub on a free port of this machine."""
    hub = SmallHub()
    app = Starlette(routes=[Route("/{path:path}", hub.handle, methods=["GET", "POST", "PUT"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    hub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join()
