"""Docstrings -> prose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.data import package_docs
from domext_ray.data.documents import read_documents
from domext_ray.data.dropped import Dropped
from domext_ray.data.package_docs import extract_prose, get_or_write_documents, read_paragraphs
from domext_ray.data.sources import resolve_sources

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
    sources = resolve_sources("package-docs", PrepareConfig(), tmp_path / "corpora")
    (file,) = sources.files
    assert Path(file.path).parent == tmp_path / "corpora" and file.size == Path(file.path).stat().st_size
    (tmp_path / "shop.py").unlink()
    assert list(read_documents(sources.tasks[0], PrepareConfig(field="body"), Dropped())) == PROSE
    again = resolve_sources("package-docs:all", PrepareConfig(), tmp_path / "elsewhere")
    assert again.fingerprint == sources.fingerprint and again.files != sources.files
    assert resolve_sources("package-docs:1", PrepareConfig()).fingerprint != sources.fingerprint


def test_what_is_installed_here_is_read_as_far_as_it_is_used() -> None:
    sources = resolve_sources("package-docs:1", PrepareConfig(shard_bytes=2**19))
    assert 1_000_000 <= sources.num_bytes < 1_100_000 and len(sources.tasks) == 2
    texts = [text for task in sources.tasks for text in read_documents(task, PrepareConfig(), Dropped())]
    assert texts == [" ".join(each.split()) for each in itertools.islice(read_paragraphs(), len(texts))]
    index = package_docs._index_distributions()
    assert "numpy" in index and "domext_ray" not in index and "domext-ray" not in index
    assert get_or_write_documents(1).name == Path(sources.files[0].path).name
