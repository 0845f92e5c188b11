"""Datasets of the hub, whose part a server of this machine plays: the real clients ask it, in their own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.options.build import identity_of
from domext_ray.config.pretrain import PretrainConfig, ReplayConfig
from domext_ray.errors import CorpusError
from domext_ray.pretraining.plan import pin_corpus
from domext_ray.text.data.files import HUB, SourceFile, find_files, open_stream, pin_entries

OLD, NEW = "1" * 40, "2" * 40
CARD = """---
configs:
- {config_name: notes, data_files: [{split: train, path: notes/*}, {split: test, path: other/*}]}
- {config_name: other, data_files: [{split: train, path: other/*}]}
---
"""
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
ASK = """
import json, sys
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.files import pin_entries
from domext_ray.text.data.sources import resolve_sources
from domext_ray.errors import CorpusError
for spec in sys.argv[1:]:
    try:
        found = resolve_sources(spec, PrepareConfig(min_document_chars=1))
        texts = list(read_documents(found.tasks[0], PrepareConfig(min_document_chars=1), Dropped()))
        print(json.dumps([pin_entries(spec, "", None), [each.path for each in found.files], texts, found.fingerprint]))
    except CorpusError as error:
        print(json.dumps(str(error)))
"""


def list_repository(commit: str) -> dict[str, bytes]:
    texts = {"notes/a.jsonl": f"a note of {commit[0]}", "other/b.jsonl": f"another of {commit[0]}"}
    return {"README.md": CARD.encode()} | {name: json.dumps({"text": text}).encode() for name, text in texts.items()}


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as reading the dataset org/set needs; `main` is the newer commit."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        asked = re.search(r"/(?:revision|tree|resolve)/([^/]+)/?(.*)", path)
        commit = OLD if asked and asked[1] == OLD else NEW
        files, name = list_repository(commit), asked[2] if asked else ""
        status, body = 200, b""
        if "/resolve/" in path:
            status, body = (200, files[name]) if name in files else (404, b"")
        elif "/tree/" in path:
            inside = [file for file in files if file.startswith(name)]
            entries = [{"type": "file", "oid": "0", "size": len(files[file]), "path": file} for file in inside]
            folders = [{"type": "directory", "oid": "0", "path": folder} for folder in ("notes", "other")]
            body = json.dumps(entries if name else folders).encode()
        else:
            listed = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            body = json.dumps({"id": "org/set", "sha": commit, "siblings": listed}).encode()
        self.send_response(status)
        error = {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit}{name}"', "Content-Length": str(len(body)), **error}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    places = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hub")}
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    yield {**os.environ, **places, **cache, **ONLINE}
    server.shutdown()


def ask(environment: dict[str, str], *specs: str) -> tuple[list[list[object] | str], list[str]]:
    """What is found, and the notes."""
    command = [sys.executable, "-c", ASK, *specs]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    notes = [line for line in found.stderr.splitlines() if line.startswith("note:")]
    return [json.loads(line) for line in found.stdout.splitlines()], notes


def test_a_dataset_is_read_at_one_commit(hub: dict[str, str]) -> None:
    """A configuration can be named; what is pinned is found again without the hub."""
    pinned, by_branch = f"hf://org/set:notes@{NEW}", f"hf://org/set:other@main@{NEW}"
    (newest, old, other, unnamed, missing), notes = ask(
        hub,
        "hf://org/set:notes",
        f"hf://org/set:notes@{OLD}",
        "hf://org/set:other@main",
        "hf://org/set",
        "hf://org/set:x",
    )
    assert newest[:3] == [pinned, [f"org/set@{NEW}/notes/a.jsonl"], ["a note of 2"]]
    assert old[:3] == [f"hf://org/set:notes@{OLD}", [f"org/set@{OLD}/notes/a.jsonl"], ["a note of 1"]]
    assert other[:3] == [by_branch, [f"org/set@{NEW}/other/b.jsonl"], ["another of 2"]]
    assert len({str(answer[3]) for answer in (newest, old, other)}) == 3
    assert "'notes', 'other'" in unnamed and "'x' not found" in missing
    told = "note: of {} (splits: train, test) the split train alone is text; to read another, download its "
    told += "files and name them."
    assert notes == [told.format(spec) for spec in ("hf://org/set:notes", f"hf://org/set:notes@{OLD}")]
    assert ask({**hub, "HF_HUB_OFFLINE": "1"}, pinned, by_branch) == ([newest, other], [told.format(pinned)])
    (refused,), _ = ask({**hub, "HF_HUB_OFFLINE": "1"}, "hf://org/set:notes")
    assert refused.startswith("--corpus 'hf://org/set:notes' could not be fetched")


def test_a_run_keeps_the_commit_that_it_began_with() -> None:
    known = f"a.txt,hf://org/set:notes@{OLD},package-docs:7"
    for spec in ("a.txt,hf://org/set:notes,package-docs", known):
        assert pin_entries(spec, known, 9) == known
    assert pin_entries("b.txt, c.txt", known, 9) == "b.txt, c.txt"
    assert pin_entries("package-docs", known, 9) == "package-docs:7"
    assert pin_entries("package-docs", "", 9) == "package-docs:9"
    assert pin_entries("package-docs", "", None) == "package-docs:all"
    of_a_tag = f"hf://org/set@v1@{OLD}"
    assert pin_entries("hf://org/set@v1", of_a_tag, None) == pin_entries(of_a_tag, "", None) == of_a_tag
    assert pin_entries("hf://org/set@main", "hf://org/set@main", None) == "hf://org/set@main", "a run of 0.1.0"
    for other in ("hf://org/set", "hf://org/set@v2"):  # which is another text than that of the tag
        with pytest.raises(CorpusError, match=f"--corpus '{other}' could not be fetched"):
            pin_entries(other, of_a_tag, None)
    for spec in ("hf://org/set:notes:more", "hf://a/b/c", "hf://"):
        with pytest.raises(CorpusError, match="names no dataset; write hf://OWNER/NAME"):
            find_files(spec)


def test_all_texts_of_a_run_keep_their_commits() -> None:
    def make(suffix: str) -> PretrainConfig:
        corpora = [f"hf://org/{name}@main{suffix}" for name in ("own", "general", "more")]
        mixture = MixtureConfig(parts={"more": {"corpus": corpora[2], "weight": 2.0}})
        return PretrainConfig(corpus=corpora[0], replay=ReplayConfig(corpus=corpora[1]), mixture=mixture)

    begun = make(f"@{OLD}")
    stored = identity_of(begun)
    assert pin_corpus(make(""), stored) == begun
    of_a_study = {**stored, "replay": {}, "replay.corpus": begun.replay.corpus}
    assert pin_corpus(make(""), of_a_study) == begun


def test_every_node_opens_the_commits_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache here, as it is after a download."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for commit in (OLD, NEW):
        path = tmp_path / "datasets--org--set" / "snapshots" / commit / "notes" / "a.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(list_repository(commit)["notes/a.jsonl"])
        with open_stream(SourceFile(f"org/set@{commit}/notes/a.jsonl", "jsonl", 1, HUB)) as stream:
            assert stream.read() == list_repository(commit)["notes/a.jsonl"]
