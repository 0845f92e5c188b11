"""Docstrings -> prose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.data import package_docs
from domext_ray.data.package_docs import extract_prose, find_distributions, read_paragraphs
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
    package_docs._index_distributions.cache_clear()
    yield
    package_docs._index_distributions.cache_clear()


@pytest.mark.usefixtures("_own_distribution")
def test_docstrings_of_a_distribution() -> None:
    assert find_distributions() == [("shop", len(SOURCE) + 10)]
    assert package_docs.describe_distribution("shop").startswith("shop 1.0 ")
    assert list(read_paragraphs("shop")) == [
        "This module is about a shop and everything that it sells.",
        "A shop keeps its goods until somebody comes and buys them.",
        "Take the money from the buyer and hand over the goods.",
    ]


def test_what_is_installed_here_makes_a_corpus() -> None:
    resolved = resolve_sources("package-docs", PrepareConfig())
    assert resolved.num_bytes > 5_000_000 and len(resolved.tasks) > 1
    assert resolved.fingerprint == resolve_sources("package-docs", PrepareConfig()).fingerprint
    names = [name for name, _ in find_distributions()]
    assert "numpy" in names and "domext_ray" not in names and "domext-ray" not in names
