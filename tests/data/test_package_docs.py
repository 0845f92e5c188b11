"""Docstrings -> prose."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, TrainConfig
from domext_ray.pretraining.plan import pin_corpus
from domext_ray.storage import Place
from domext_ray.text.data import package_docs
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.package_docs import extract_prose, read_paragraphs
from domext_ray.text.data.sources import resolve_sources

DOCSTRING = """Return the table in which every row has its own number.

    The rows come in the order of :class:`~shop.Table`, and ``None`` stands
    for a `price` that nobody knows (see [the guide](https://example.org/guide)).

    >>> make_table([1, 2, 3]).show_the_rows_in_the_right_order(now=True)
    This is what the example prints, which is no prose at all.

    Parameters
    ----------
    prices : list of float, optional
        These are the prices of all goods that the shop sells.
    limit (int): The largest number of rows that the table may ever have.

    - The first item of a list is a sentence that can stand alone.
    - The second item goes on
      over one more line of the docstring.

    .. note:: a directive

    ```
    This line of code reads like a sentence but stands in a fence.
    ```

    Too short.
    x = a[0] + b[1] * c[2] - d(3) / e(4) ; f = {g: h} | {i: j} & k.
"""

SOURCE = b'''# a comment
"""This module is about a shop and everything that it sells."""

name = """A string that is no docstring should never be found here."""


class Shop:
    r\'\'\'A shop keeps its goods until somebody comes and buys them.\'\'\'

    def sell(self):  # goods only
        """Take the money from the buyer and hand over the goods."""
        return """Nor is a string that a function gives back to us."""
'''


def test_prose_of_a_docstring() -> None:
    assert list(extract_prose(DOCSTRING)) == [
        "Return the table in which every row has its own number.",
        "The rows come in the order of shop.Table, and None stands for a price that nobody knows (see the guide).",
        "These are the prices of all goods that the shop sells.",
        "The largest number of rows that the table may ever have.",
        "The first item of a list is a sentence that can stand alone.",
        "The second item goes on over one more line of the docstring.",
    ]


@pytest.fixture
def _own_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shop.py").write_bytes(SOURCE)
    record = tmp_path / "shop-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: Shop\nVersion: 1.0\n")
    (record / "RECORD").write_text(f"shop.py,,{len(SOURCE)}\ngone.py,,10\nshop/tests/test_shop.py,,50\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package_docs._index_distributions.cache_clear()
    yield
    package_docs._index_distributions.cache_clear()


PROSE = [
    "This module is about a shop and everything that it sells.",
    "A shop keeps its goods until somebody comes and buys them.",
    "Take the money from the buyer and hand over the goods.",
]


@pytest.mark.usefixtures("_own_distribution")
def test_docstrings_of_a_distribution(tmp_path: Path) -> None:
    """They are written once, to a folder that all nodes see, and read there by whoever has other packages."""
    assert list(read_paragraphs()) == PROSE
    sources = resolve_sources("package-docs", PrepareConfig(), Place(tmp_path / "corpora"))
    (file,) = sources.files
    assert Path(file.path).parent == tmp_path / "corpora" and file.size == Path(file.path).stat().st_size
    again = resolve_sources("package-docs:all", PrepareConfig(), Place(tmp_path / "elsewhere"))
    (tmp_path / "shop.py").unlink()
    assert list(read_documents(sources.tasks[0], PrepareConfig(field="body"), Dropped())) == PROSE
    assert again.fingerprint == sources.fingerprint and again.files != sources.files


JOB = """
import sys
import ray
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.text.data import package_docs, sources
from domext_ray.storage import Place
package_docs.read_paragraphs = lambda: iter(["This job writes this sentence."])
with package_docs.write_ahead("package-docs:1", folder := Place(sys.argv[1])):
    if folder.name == "killed":
        package_docs._ahead["package-docs:1", str(folder)].kill()
    sources.resolve_sources("package-docs:1", PrepareConfig(), folder)
assert not package_docs._ahead
"""


@pytest.mark.slow
def test_a_process_writes_ahead_what_a_corpus_names(tmp_path: Path) -> None:
    """What reads it waits for that process; one that was killed has written nothing, and is not missed."""
    for name in (
        "ahead",
        "killed",
    ):  # in a process of its own: packages that other tests brought are on this one's path
        command = [sys.executable, "-c", JOB, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / name).iterdir()
        assert (file.read_text(encoding="utf-8") == '{"text": "This job writes this sentence."}\n') == (
            name == "killed"
        )


def test_what_is_installed_here_is_read_as_far_as_it_is_used() -> None:
    sources = resolve_sources("package-docs:1", PrepareConfig(shard_bytes=2**19))
    assert 1_000_000 <= sources.num_bytes < 1_100_000 and len(sources.tasks) == 2
    texts = [text for task in sources.tasks for text in read_documents(task, PrepareConfig(), Dropped())]
    assert texts == [" ".join(paragraph.split()) for paragraph in itertools.islice(read_paragraphs(), len(texts))]
    index = package_docs._index_distributions()
    assert "numpy" in index and "domext_ray" not in index and "domext-ray" not in index


def test_a_run_reads_as_much_as_it_can_use() -> None:
    """That is decided when it begins, and stays where it goes on, so that it goes on with the same rows."""
    train = TrainConfig(max_steps=500, global_batch_size=32, seq_length=128, eval_rows=400)
    config = PretrainConfig(train=train)
    assert pin_corpus(config, {}).corpus == "package-docs:16"  # its held-out rows need more than its steps
    longer = replace(config, train=replace(train, max_steps=1500), corpus="package-docs,notes.txt")
    assert pin_corpus(longer, {}).corpus == "package-docs:38,notes.txt"
    limited = replace(longer, train=replace(longer.train, max_steps=0, max_tokens=3_000_000))
    assert pin_corpus(limited, {}).corpus == "package-docs:19,notes.txt"
    for whole in (
        replace(config, train=replace(train, epochs=1.0)),
        replace(config, train=replace(train, max_steps=10**7)),
        replace(config, vocab=replace(config.vocab, size=500)),
    ):
        assert pin_corpus(whole, {}).corpus == "package-docs:all"
    stored = {"corpus": "package-docs:16"}
    more = replace(config, train=replace(train, max_steps=1500))
    assert pin_corpus(more, stored).corpus == "package-docs:16"
    assert pin_corpus(replace(more, corpus="notes.txt"), stored).corpus == "notes.txt"
