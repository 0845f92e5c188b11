"""Which files of a folder are its text, on a disk and in a bucket alike, and what is said of the others."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from object_store import BUCKET, put_object, use_objects

from domext_ray.errors import CorpusError
from domext_ray.files import split_paths
from domext_ray.text.data import folders
from domext_ray.text.data.files import find_files

TEXT = b"some words of a line\n"
LARGE = TEXT * 100


def list_files(names: str) -> dict[str, bytes]:
    return dict.fromkeys(names.split(), TEXT)


def make_card(*configs: str) -> dict[str, bytes]:
    return {"README.md": "---\nlicense: mit\nconfigs:\n{}\n---\n# Notes\n".format("\n".join(configs)).encode()}


SHARDS = {f"data/{name}-00000-of-00001.parquet": TEXT for name in ("train", "validation", "test", "extra")}
COMMITS = [f"snapshots/{letter * 40}/a.txt" for letter in "ab"]
SPLIT = "- {{config_name: {0}, data_files: [{{split: train, path: {0}/*.txt}}, {{split: test, path: {0}/held/*}}]}}"
BY_CARD = list_files("a/1.txt a/2.txt a/held/1.txt b/1.txt")
ALL_READ = "of several kinds, of which none is most of it, and all are read: "

KEPT: dict[str, tuple[Mapping[str, bytes], str, str]] = {
    "text": (list_files("a.txt b.md c d/_notes.txt latest.txt"), "a.txt b.md c d/_notes.txt latest.txt", ""),
    "card": (
        BY_CARD | make_card(SPLIT.format("a")),
        "a/1.txt a/2.txt",
        "train alone .*: a/held/1.txt, b/1.txt; .*README",
    ),
    "default": (
        BY_CARD | make_card(SPLIT.format("b"), SPLIT.format("default")) | {"default/1.txt": TEXT},
        "default/1.txt",
        "left out: a/1.txt, a/2.txt, a/held/1.txt and 1 more; to read",
    ),
    "a string": (
        BY_CARD | make_card("- {config_name: x, data_files: b/**}"),
        "b/1.txt",
        "a/1.txt, a/2.txt, a/held/1.txt;",
    ),
    "shards": (
        SHARDS | list_files("README.md dataset_infos.json"),
        "data/train-00000-of-00001.parquet",
        "splits: extra, test, train, validation. the split train alone is text; left out: data/extra-0",
    ),
    "names": (
        list_files("train.jsonl dev.jsonl more.jsonl clinic_test_2.jsonl"),
        "more.jsonl train.jsonl",
        "splits: train, validation, test. the .*: clinic_test_2.jsonl, dev.jsonl; to read such a file",
    ),
    "capitals": (list_files("Train.csv Test.csv"), "Train.csv", "left out: Test.csv"),
    "folders": (
        list_files("train/test-1.txt test/train-1.txt validation/1.txt"),
        "train/test-1.txt",
        "left out: test/train-1.txt, validation/1.txt",
    ),
    "some are called test": (
        list_files("blood-test.txt dev.txt notes.txt"),
        "blood-test.txt dev.txt notes.txt",
        "all files of FOLDER are read, though some have the name of another split than train: blood-test.txt, dev.txt;",
    ),
    "few are called train and test": (
        list_files("training-2.txt blood-test.txt 1.txt 2.txt"),
        "1.txt 2.txt blood-test.txt training-2.txt",
        "all files of FOLDER are read, though some .*: blood-test.txt; to leave such files out, name the others",
    ),
    "a cache": (
        list_files("cache-1.arrow cache-1_00000_of_00002.arrow dataset_info.json text-train.arrow tmpa1b2c3_4"),
        "text-train.arrow",
        "repeats its text, .*: cache-1.arrow, cache-1_00000_of_00002.arrow, dataset_info.json and 1 more; .*FOLDER/..",
    ),
    "saved below": (
        list_files("x/dataset_dict.json x/train/data-0.arrow x/train/state.json x/test/data-0.arrow"),
        "x/train/data-0.arrow",
        "left out: x/test/data-0.arrow;",
    ),
    "Spark": (
        list_files("part-00000 part-00001 _SUCCESS _started_12 _committed_12 .part-00000.crc a/b.crc"),
        "part-00000 part-00001",
        ": _SUCCESS, _committed_12, _started_12 and 1 more",
    ),
    "Delta": (list_files("p.parquet _delta_log/0.json _delta_log/0.checkpoint.parquet"), "p.parquet", "_delta_log"),
    "Parquet": (list_files("a/p.parquet _metadata _common_metadata"), "a/p.parquet", ": _common_metadata, _metadata;"),
    "about": (
        list_files("a.txt LICENSE NOTICE.md README sub/readme-zh.md SHA256SUMS a.txt.md5 a.txt~"),
        "a.txt",
        "LICENSE, NOTICE.md, README and 4 more",
    ),
    "left behind": (
        list_files("a.txt a.txt.bak b.txt.swp #a.txt# ~$a.txt c.txt.part d.txt.crdownload e.txt.orig"),
        "a.txt",
        "#a.txt#, a.txt.bak, b.txt.swp and 4 more",
    ),
    "brat": (list_files("a.txt a.ann b.txt b.ann"), "a.txt b.txt", ": a.ann, b.ann;"),
    "annotations alone": (list_files("a.ann b.ann"), "a.ann b.ann", ""),
    "few pages": (
        list_files("1.txt 2.txt 3.md 4.log 5.html 1.conllu"),
        "1.conllu 1.txt 2.txt 3.md 4.log 5.html",
        ALL_READ,
    ),
    "a page": (list_files("1.txt 2.txt 3.md 4.log 5.html"), "1.txt 2.txt 3.md 4.log", "another kind .*: 5.html;"),
    "names like these": (
        list_files(f"license-talks.txt noticed.txt {COMMITS[0]} state.json.txt tmpa1b2c3_4.txt"),
        f"license-talks.txt noticed.txt {COMMITS[0]} state.json.txt tmpa1b2c3_4.txt",
        "",
    ),
    "a README each": (
        list_files("a/README.md b/README.md c/README.md b/LICENSE"),
        "a/README.md b/LICENSE b/README.md c/README.md",
        "",
    ),
    "a README each and a text": (
        list_files("a/README.md b/README.md c/README.md c.txt b/LICENSE"),
        "a/README.md b/README.md c.txt c/README.md",
        ": b/LICENSE;",
    ),
    "few strangers": (
        list_files("1.jsonl 2.jsonl.gz 3.ndjson 4.txt"),
        "1.jsonl 2.jsonl.gz 3.ndjson",
        "of another kind than most of it, is left out: 4.txt; to read such a file, name it, too, or FOLDER/.. for all",
    ),
    "a PDF": (list_files("1.txt 2.txt 3.txt") | {"4.pdf": b"%PDF-"}, "1.txt 2.txt 3.txt", "4.pdf"),
    "half and half": (
        list_files("1.txt 2.csv 3.csv 4.txt"),
        "1.txt 2.csv 3.csv 4.txt",
        f"{ALL_READ}2 text .1.txt, ….; 2 csv",
    ),
    "a large one": (list_files("a.txt b.txt c.txt") | {"d.csv": LARGE}, "a.txt b.txt c.txt d.csv", f"{ALL_READ}3 text"),
    "a large one among few": (
        list_files("a.txt c.txt") | {"d.jsonl": LARGE},
        "a.txt c.txt d.jsonl",
        f"{ALL_READ}2 text",
    ),
}
"""Files -> those that are read, and what is said."""

REFUSED: dict[str, tuple[Mapping[str, bytes], str]] = {
    "test alone": (
        list_files("test-1.txt sub/dev.txt README.md"),
        r"names FOLDER, whose files are by their names all of another split than train \(sub/dev.txt, test-1.txt\); to "
        r"train on them, name them, such as FOLDER/sub/dev.txt, or give a glob, such as FOLDER/\*\*/\*.txt\.$",
    ),
    "no train": (
        BY_CARD | make_card("- {config_name: x, data_files: [{split: test, path: b/*}]}"),
        r"a dataset by its README.md, whose split 'train' is missing; name what is text in it, such as FOLDER/b/1\.t",
    ),
    "train is elsewhere": (
        BY_CARD | make_card("- {config_name: x, data_files: c/*}"),
        r"whose split 'train' is without a file; name what is text in it\.$",
    ),
    "two": (
        BY_CARD | make_card(SPLIT.format("a"), SPLIT.format("b")),
        r"FOLDER has 2 datasets by its README.md \(a, b\); name the files of one: FOLDER/a/\*.txt, FOLDER/b/\*.txt\.$",
    ),
    "no configurations": (
        BY_CARD | make_card("- {data_files: a/*}"),
        "FOLDER/README.md declares a dataset and cannot be read .*config_name",
    ),
    "no YAML": (
        BY_CARD | make_card("- {config_name: [}"),
        "FOLDER/README.md declares a dataset and cannot be read .*; mend its header",
    ),
    "no files": (
        BY_CARD | make_card("- {config_name: x, data_files: 7}"),
        "cannot be read .*; mend its header, or name the files",
    ),
    "the hub's cache": (
        list_files(" ".join(["refs/main", *COMMITS, "blobs/x"])),
        "the hub's client keeps every file twice; name a commit's folder in it: FOLDER/snapshots/aa.*, FOLDER/snapsh",
    ),
    "the hub's caches": (
        list_files(f"datasets--x--y/{COMMITS[0]} datasets--x--y/blobs/x other/a.txt"),
        "name a commit's folder in it: FOLDER/datasets--x--y/snapshots/a{40}\\.$",
    ),
    "PDFs": (list_files("1.txt 2.txt 3.pdf"), "includes .*3.pdf, which is no plain text but a PDF"),
}

Say = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    """What is said from here on."""
    folders.say.cache_clear()
    return lambda: capsys.readouterr().err


def check_folders(
    make: Callable[[str, Mapping[str, bytes]], str], said: Say, names: Collection[str] = (*KEPT, *REFUSED)
) -> None:
    for name, (files, kept, note) in ((key, KEPT[key]) for key in names if key in KEPT):
        folder = make(name.replace(" ", "-"), files)
        paths = [file.address for file in find_files(folder)[0]]
        told = said()
        assert paths == [f"{folder}/{path}" for path in kept.split()], name
        assert re.search(note.replace("FOLDER", folder), told.replace("\n", " ")) and (note or not told), (name, told)
        if name != "a PDF":  # which a glob may not name
            assert [file.address for file in find_files(f"{folder}/**")[0]] == sorted(
                f"{folder}/{path}" for path in files
            )
    for name, (files, message) in ((key, REFUSED[key]) for key in names if key in REFUSED):
        folder = make(name.replace(" ", "-"), files)
        with pytest.raises(CorpusError, match=message.replace("FOLDER", re.escape(folder))) as caught:
            find_files(folder)
        assert "\n" not in str(caught.value)


def test_a_folder_of_a_disk(tmp_path: Path, said: Say) -> None:
    def make(name: str, files: Mapping[str, bytes]) -> str:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return str(tmp_path / name)

    check_folders(make, said)
    predicted = [
        find_files(f"{tmp_path}/{folder}", by_names=False)[0] for folder in ("names", "test-alone", "shards", "card")
    ]
    assert [len(found) for found in predicted] == [4, 2, 4, 2], "names alone count for nothing where a model is tried"


def test_a_folder_of_a_bucket(objects: str, said: Say) -> None:
    def make(name: str, files: Mapping[str, bytes]) -> str:
        for file, content in files.items():
            put_object(objects, f"folders/{name}/{file}", content)
        return f"{BUCKET}/folders/{name}"

    check_folders(make, said, ("card", "names", "a cache", "Spark", "few strangers", "test alone", "two"))


def make_links(folder: Path) -> None:
    """Links to folders above, beside, below and elsewhere, and from a hidden folder."""
    for name in ("c/a.txt", "c/b/b.txt", "c/b/deep/d.txt", "side/s.txt", "c/.h/x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(TEXT)
    for link, target in {
        **{"c/up": "..", "c/up2": "..", "c/b/top": "..", "c/b/deep/top2": f"{folder}/c", "c/aa": "b"},
        **{"c/.h/link": "../b", "c/b/zz": f"{folder}/side", "side/round": "../side", "c/b/deep/b2": "../../b"},
    }.items():
        (folder / link).symlink_to(target)


LINKED = {
    "c": "a.txt aa/b.txt aa/deep/d.txt aa/zz/s.txt",
    "c/**": ".h/x.txt a.txt aa/b.txt aa/deep/d.txt aa/zz/s.txt",
    "c/**/*.txt": ".h/x.txt a.txt aa/b.txt aa/deep/d.txt aa/zz/s.txt",
    "c/**.txt": ".h/x.txt a.txt aa/b.txt aa/deep/d.txt aa/zz/s.txt",
    "c/b/**/*.txt": "b/b.txt b/deep/d.txt b/zz/s.txt",
    "c/b/top/*.txt": "b/top/a.txt",
    "c/*/b.txt": "aa/b.txt",
    "c/**/b/*.txt": "b/b.txt",
    "c/b*/deep/*.txt": "b/deep/d.txt",
    "c/b**d.txt": "b/deep/d.txt",
    "c/**/top2/**/s.txt": "aa/deep/top2/aa/zz/s.txt",
    "c/*/deep/b2/zz/?.txt": "aa/deep/b2/zz/s.txt",
}


def test_every_folder_is_entered_once_whatever_links_lead_to_it(tmp_path: Path) -> None:
    make_links(tmp_path)
    for spec, names in LINKED.items():
        found, repeated = find_files(f"{tmp_path}/{spec}")
        assert [file.path.removeprefix(f"{tmp_path}/c/") for file in found] == names.split(), spec
        assert not repeated
    nothing = f"{tmp_path}/c/**/*.nothing"
    assert split_paths(f"{nothing},{tmp_path}/c") == [nothing, f"{tmp_path}/c"]


def test_folders_that_all_link_to_each_other(tmp_path: Path) -> None:
    """There are more paths than anybody can count."""
    for name in "abcdefghijkl":
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_bytes(TEXT)
        for other in "abcdefghijkl":
            (tmp_path / name / f"to-{other}").symlink_to(f"../{other}")
    for spec in (tmp_path, f"{tmp_path}/**/*.txt"):
        assert len(find_files(str(spec))[0]) == 12


def test_a_stop_is_obeyed_while_a_bucket_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered, may_answer = threading.Event(), threading.Event(), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.set()
            may_answer.wait(120)
            answered.set()
            self.send_error(403)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_objects(f"http://127.0.0.1:{server.server_port}", monkeypatch)

    def stop() -> None:
        asked.wait(120)
        os.kill(os.getpid(), signal.SIGINT)

    own = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    threading.Thread(target=stop, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            find_files(f"{BUCKET}/texts")
    finally:
        signal.signal(signal.SIGINT, own)
    assert not answered.is_set()
    may_answer.set()
    server.shutdown()
