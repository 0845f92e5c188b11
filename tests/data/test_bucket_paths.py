"""Text in a bucket: which address names which objects, and what is said of one that names none."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import BUCKET, put_object, use_objects
from row_files import read_texts

from domext_ray.commands.early import check_text
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError, StorageError
from domext_ray.storage import Place
from domext_ray.text.data import folders
from domext_ray.text.data.files import find_files
from domext_ray.text.data.sources import resolve_sources

ODD = ["[x].txt", "a b.txt", "a*b.txt", "c#d.txt", "c,d.txt", "e?f.txt", "end ", "g%20h.txt", "i+j.txt", "ünï 漢.txt"]
TEXTS = ["t/a.txt", "t/b.jsonl", "t/sub/c.txt", "both/x", "both/x/y.txt", "marked/a.txt", "marked/sub/b.txt"]
TEXTS += ["bad/slash//e.txt", "bad/dots/../f.txt", "bad/control/\x01.txt", "bad/g.txt", *(f"odd/{x}" for x in ODD)]
MARKERS = ["marked/", "marked/sub/", "marked/empty/", "only/"]
LONG = f"long/{'n' * 1000}"

NAMED = {
    "paths/t": ["t/a.txt", "t/b.jsonl", "t/sub/c.txt"],
    "paths/t/": ["t/a.txt", "t/b.jsonl", "t/sub/c.txt"],
    "paths/t/a.txt": ["t/a.txt"],
    "paths/t/*.jsonl": ["t/b.jsonl"],
    "paths/*/*.txt": ["bad/g.txt", "marked/a.txt", *(f"odd/{name}" for name in ODD if name != "end "), "t/a.txt"],
    "paths/t/**/c.txt": ["t/sub/c.txt"],
    "paths/both/x/": ["both/x/y.txt"],
    "paths/both/[x]": ["both/x"],
    "paths/both": ["both/x", "both/x/y.txt"],
    "paths/marked": ["marked/a.txt", "marked/sub/b.txt"],
    "paths/marked/": ["marked/a.txt", "marked/sub/b.txt"],
    "paths/odd/": [f"odd/{name}" for name in ODD],
    "paths/odd/e?f.txt": ["odd/e?f.txt"],
    "paths/odd/[x].txt": ["odd/[x].txt"],
    "paths/odd/g%20h.txt": ["odd/g%20h.txt"],
    "paths/odd/ünï 漢.txt": ["odd/ünï 漢.txt"],
    f"paths/{LONG}": [LONG],
}
NO_BUCKET, SLASH, DOTS = "name of a bucket: small", "one slash between two names", r"no \. or \.\. between"
SMALL, KINDS = "begins with s3://BUCKET/ or gs://BUCKET/, in small", "a path, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or"
REFUSED = {
    **dict.fromkeys(("s3://", "s3:///t", "gs:///t", "s3:// /t", "s3://BUCKET/texts/", "s3://Paths/t"), NO_BUCKET),
    **dict.fromkeys(("s3://runs?region=x/t", "s3://*/t", "s3://-x/t"), NO_BUCKET),
    **dict.fromkeys(("s3://runs//t", "s3://runs//", "s3://runs/t//", "s3://runs/t//a.txt"), SLASH),
    **dict.fromkeys(("s3://runs/t/../t", "s3://runs/./t", "s3://runs/.."), DOTS),
    "s3://runs/t\x01": "without control characters",
    f"s3://runs/{'n' * 1025}": "at most 1024 bytes behind the bucket",
    **dict.fromkeys(("S3://runs/t", "s3a://runs/t", "gcs://runs/t", "s3:/runs/t"), SMALL),
    **dict.fromkeys(("https://runs.s3.amazonaws.com/t", "ftp://runs/t"), KINDS),
    **dict.fromkeys(("file:/etc/hostname", "file://etc/hostname"), "a plain path, such as /etc/hostname"),
}
NOT_THERE = {
    "s3://no-such-bucket": "there is no bucket s3://no-such-bucket; make it",
    "s3://no-such-bucket/t/": "there is no bucket s3://no-such-bucket; make it",
    "s3://no-such-bucket/t/*.txt": "there is no bucket s3://no-such-bucket; make it",
    "s3://runs/paths/nothing": "names no file",
    "s3://runs/paths/t/*.csv": "names no file",
    "s3://runs/paths/only/": "names no file",
    "s3://runs/paths/both/x": r"both/x, which is both .* folder as \S+/x/, or the file as s3://runs/\S+/\[x\]\.$",
    "s3://runs/paths/bad/slash": r"includes 's3://runs/paths/bad/slash//e.txt', .* one slash",
    "s3://runs/paths/bad": r"includes 's3://runs/paths/bad/\S+', which cannot be read; it must be an address",
}


@pytest.fixture(scope="module")
def texts(object_server: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        use_objects(object_server, patched)
        for name in [*TEXTS, LONG]:
            put_object(object_server, f"paths/{name}")
        for name in MARKERS:
            put_object(object_server, f"paths/{name}", b"")
        yield


def test_an_address_names_objects(texts: None) -> None:
    for spec, names in NAMED.items():
        found = find_files(f"s3://runs/{spec}")[0]
        assert [file.path.removeprefix("runs/paths/") for file in found] == sorted(names), spec
    prepare = PrepareConfig(min_document_chars=1)
    read, _ = read_texts("s3://runs/paths/odd", prepare)
    assert read == ["some words of a line"] * len(ODD), "each is opened by the name that it was listed with"


def test_what_is_no_address_is_refused_before_anybody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    (tmp_path / "a.txt").write_text("some words of a line\n")
    for spec, says in REFUSED.items():
        with pytest.raises(CorpusError, match=rf"^--input {re.escape(repr(spec.strip()))} cannot be read; .*{says}"):
            check_text("input", spec)
        with pytest.raises(CorpusError, match=says):
            find_files(f"{tmp_path / 'a.txt'},{spec}")


def test_what_is_not_there_is_named(texts: None) -> None:
    for spec, says in NOT_THERE.items():
        with pytest.raises(CorpusError, match=f"^--corpus .*{says}"):
            find_files(spec)


def test_what_jobs_have_made_is_no_text(objects: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in the bucket of its own text: at its second start it reads what it read at the first one."""
    put_object(objects, "own/notes.txt")
    put_object(objects, "own/data/run.json")  # somebody's own
    before = resolve_sources(f"{BUCKET}/own/", PrepareConfig()).fingerprint
    made = """runs/af/attempts/000001.json runs/index.html runs/.corpora/ab/manifest.json bert/domext_export.json
        runs/af/export/config.json old/run.json old/config.yaml bank/bank.json bank/adapters/x/adapter.json"""
    for name in made.split():
        put_object(objects, f"own/{name}")
    folders.say.cache_clear()
    for spec in ("own", "own/", "own/**"):
        assert resolve_sources(f"{BUCKET}/{spec}", PrepareConfig()).fingerprint == before
    said = capsys.readouterr().err
    assert said.count("note: what jobs") == 1
    assert "made is no text, and is left out: s3://runs/own/bank, s3://runs/own/bert, s3://runs/own/old and 2" in said
    with pytest.raises(CorpusError, match="names s3://runs/own/runs/af, which a job of this package has made"):
        find_files(f"{BUCKET}/own/runs/af")
    assert [file.path for file in find_files(f"{BUCKET}/own/old/*.json")[0]] == ["runs/own/old/run.json"]


def test_a_consoles_folder_is_none_of_a_folders_files(texts: None) -> None:
    for name, files_in, names in (("marked", ["a.txt", "sub/b.txt"], ["a.txt", "empty", "sub"]), ("only", [], [])):
        place = Place(f"{BUCKET}/paths/{name}")
        assert (place.list_files(), place.list_names()) == (files_in, names)
    (Place(f"{BUCKET}/paths/marked") / "empty.json").put(b"")
    assert "empty.json" in Place(f"{BUCKET}/paths/marked").list_files()


def test_an_object_that_is_no_path_is_told_at_once(texts: None) -> None:
    started = time.monotonic()
    with pytest.raises(
        StorageError, match=r"it has the object 'paths/bad/slash//e.txt', whose key is no path .* rename"
    ):
        Place(f"{BUCKET}/paths/bad/slash").list_files()
    assert time.monotonic() - started < 5
