"""Docstrings of installed packages -> labelled mentions of functions, classes, modules and parameters."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from domext_ray.corpus.texts import package_docs
from domext_ray.errors import CorpusError
from domext_ray.labelled.code_entities.build import (
    TYPES,
    SetSize,
    describe_code_entities,
    load_code_entities,
    make_code_entities,
    summarize_facts,
)
from domext_ray.labelled.code_entities.mentions import MentionFinder
from domext_ray.labelled.code_entities.names import (
    CLASS,
    FUNCTION,
    MODULE,
    VALUE,
    Definitions,
    SourcePackage,
    find_packages,
    read_docstrings,
)
from domext_ray.labelled.code_entities.parameters import list_parameters
from domext_ray.labelled.examples import SPLITS, TaggedSentence

SHOP = '''
"""All that a shop needs."""
import shop.stock.shelf as shelf
from shop.stock.shelf import find_goods

MAX_GOODS = 10


class PriceList:
    """{class_docstring}"""

    size: int

    def __init__(self, currency, tax_rate=0.0):
        self.total = sum([1])

    @property
    def cheapest(self):
        return 1

    def raise_prices(self, amount, reason=None):
        """{method_docstring}"""


class Bill:
    pass


def make_bill(customer, goods, key=None):
    """{function_docstring}"""
'''
SHELF = """
def find_goods(where):
    pass


class ShelfBoard:
    pass
"""


def label(tmp_path: Path, docstring: str, place: str = "function") -> list[list[str]]:
    """Sentences of a docstring of the shop's function, class or method; mentions as TYPE:word."""
    root = tmp_path / "shop"
    (root / "stock").mkdir(parents=True, exist_ok=True)
    texts = dict.fromkeys(("class_docstring", "method_docstring", "function_docstring"), "")
    texts[f"{place}_docstring"] = textwrap.indent(textwrap.dedent(docstring).strip(), " " * 4).strip()
    source = SHOP
    for name, text in texts.items():
        source = source.replace("{" + name + "}", text)
    files = {"shop": root / "__init__.py", "shop.bill": root / "bill.py"}
    files |= {"shop.stock": root / "stock" / "__init__.py", "shop.stock.shelf": root / "stock" / "shelf.py"}
    for each in files.values():
        each.write_text("")
    files["shop.bill"].write_text(source)
    files["shop.stock.shelf"].write_text(SHELF)
    definitions = Definitions([SourcePackage("shop", "1.0", tuple(files.items()))], with_standard_library=False)
    scope, docstrings = read_docstrings("shop.bill", files["shop.bill"])
    found = [each for each in docstrings if each.text.strip() == texts[f"{place}_docstring"]]
    return [
        [word if tag == "O" else f"{tag.removeprefix('B-')}:{word}" for word, tag in zip(s.words, s.tags, strict=True)]
        for docstring in found
        for s in MentionFinder(docstring, scope, definitions).read_sentences()
    ]


@pytest.mark.parametrize(
    ("sentence", "labelled"),
    [
        ("Every :func:`~shop.bill.make_bill` call needs a person.", "function:shop.bill.make_bill"),
        ("Every :meth:`.PriceList.raise_prices` call needs a reason here.", "function:PriceList.raise_prices"),
        ("The bill is kept by :class:`PriceList` for a year.", "class:PriceList"),
        ("The bill is kept by :py:class:`the list <PriceList>` for a year.", ""),
        ("The bill is kept by :class:`PriceList <shop.bill.PriceList>` always.", "class:PriceList"),
        ("It raises :exc:`ValueError` when the shop is closed.", "class:ValueError"),
        ("All of it is found in :mod:`shop.stock` since last year.", "module:shop.stock"),
        ("If ``customer`` is unknown then nobody pays the bill.", "parameter:customer"),
        ("If `customer` is unknown then nobody pays the bill.", "parameter:customer"),
        ("If *customer* is unknown then nobody pays the bill.", "parameter:customer"),
        ("Whoever calls ``find_goods()`` has to wait for long.", "function:find_goods"),
        ("Whoever calls find_goods() has to wait for long.", "function:find_goods"),
        ("Whoever calls ``shelf.find_goods`` has to wait for long.", "function:shelf.find_goods"),
        ("A PriceList is made once in every year.", "class:PriceList"),
        ("Boards are of the kind ``shop.stock.shelf.ShelfBoard`` in here.", "class:shop.stock.shelf.ShelfBoard"),
        ("See [`PriceList`] for what a shop may take.", "class:PriceList"),
        ("See [`~shop.bill.PriceList`](https://example.org) for what it takes.", "class:shop.bill.PriceList"),
    ],
)
def test_markup_becomes_labels(tmp_path: Path, sentence: str, labelled: str) -> None:
    found = label(tmp_path, sentence)
    mentions = [word for each in found for word in each if word.startswith(TYPES) and ":" in word[:-1]]
    assert mentions == ([labelled] if labelled else [])
    assert not any(set("`~*") & set(word) or "()" in word for each in found for word in each)
    assert bool(found) == bool(labelled)  # a sentence whose mark nobody can read is left out whole


@pytest.mark.parametrize(
    "sentence",
    [
        "Whoever sells ``unknown_thing`` has to pay for it.",  # nothing of that name
        "Whoever sells unknown_thing has to pay for it.",
        "The ``key + 1`` is what the shop will take.",  # an expression
        "It gives back a ``dict`` of all the goods.",  # a builtin type: name or word
        "Many ``Bill``s are lost before the end.",  # half of a word
        "Nobody knows what a Bill is in here.",  # a plain word with a capital that is a class as well
        "All ``PriceList`` functions take their time in here.",  # the noun says another thing
        "Set the attribute ``customer`` before you go home.",
        "Many PriceLists are lost before the end.",
        "It is called as make_bill(x) by the owner of it.",
        "A :func:`PriceList` is a function that is a class.",  # role and source differ
        "Read :ref:`the-long-label` before you go home.",
        "Have a look at https://example.org before you go home.",
        "Ein schöner ``customer`` zahlt die Rechnung bald.",
    ],
)
def test_what_is_not_sure_is_left_out(tmp_path: Path, sentence: str) -> None:
    kept = "Whoever reads ``customer`` gets it."
    assert label(tmp_path, f"{sentence}\n\n{kept}") == [["Whoever", "reads", "parameter:customer", "gets", "it", "."]]


def test_known_values_are_plain_words(tmp_path: Path) -> None:
    assert label(tmp_path, "At most ``MAX_GOODS`` are sold if ``key`` is ``None``.") == [
        "At most MAX_GOODS are sold if parameter:key is None .".split()
    ]
    assert label(tmp_path, "The ``cheapest`` of them is ``'bread'`` in most of the years.", "method") == [
        "The cheapest of them is ' bread ' in most of the years .".split()
    ]


def test_a_setting_names_its_parameter(tmp_path: Path) -> None:
    assert label(tmp_path, "With ``key=None`` everything is free for the day.") == [
        "With parameter:key = None everything is free for the day .".split()
    ]


def test_plain_word_that_is_a_name_elsewhere_in_the_docstring(tmp_path: Path) -> None:
    docstring = """If ``customer`` is poor, the shop is poor. No customer has ever paid for that.

    The shop has many of them.

    Args:
        reward: Goods that nobody has asked for.
    """
    assert label(tmp_path, docstring) == [
        "If parameter:customer is poor , the shop is poor .".split(),
        "The shop has many of them .".split(),
        # "Goods" has a capital: it is not the name of the argument `goods`.
        "Goods that nobody has asked for .".split(),
    ]
    assert label(tmp_path, "The goods are always at the back of it.") == []


def test_sentences_end_where_their_full_stops_do(tmp_path: Path) -> None:
    docstring = "Ask :func:`make_bill`. ``customer`` comes first, e.g. Bob of Ohio. It costs 2.5 times the price::"
    assert label(tmp_path, docstring + " Ask nobody else in the whole of it.") == [
        "parameter:customer comes first , e.g. Bob of Ohio .".split(),
        "It costs 2.5 times the price : Ask nobody else in the whole of it .".split(),
    ]


def test_members_of_the_own_class(tmp_path: Path) -> None:
    assert label(tmp_path, "Use `raise_prices` when ``currency`` loses its value.", "class") == [
        "Use function:raise_prices when parameter:currency loses its value .".split()
    ]
    assert label(tmp_path, "Look at ``self.raise_prices`` for what this does.", "method") == [
        "Look at function:self.raise_prices for what this does .".split()
    ]


NUMPY = """Sell.

    Parameters
    ----------
    price, limit : float
        What is paid.
            nested : not a parameter
    *extras
        More of it.

    Other Parameters
    ----------------
    color : str

    Attributes
    ----------
    shelf : int

    Returns
    -------
    total : float
    """
GOOGLE = """Sell.

    Args:
        price (float, *optional*): What is paid: much.
            It goes on: for long.
        `limit`: The most.
        **extras: More.

    Keyword Args:
        color: Which.

    Attributes:
        shelf: Where.

    Returns:
        total: How much.
    """
SPHINX = """Sell.

    :param price: what is paid
    :param float limit: the most
    :parameter \\*extras: more
    :keyword color: which
    :type price: float
    :returns: total
    """


@pytest.mark.parametrize(("docstring", "values"), [(NUMPY, {"shelf"}), (GOOGLE, {"shelf"}), (SPHINX, set())])
def test_lists_of_parameters(docstring: str, values: set[str]) -> None:
    assert list_parameters(docstring) == ({"price", "limit", "extras", "color"}, values)


def test_a_list_without_colon_or_line_is_prose() -> None:
    assert list_parameters("Parameters\n  price : float\n") == (set(), set())


def test_definitions_of_a_package(tmp_path: Path) -> None:
    label(tmp_path, "")
    files = sorted((tmp_path / "shop").rglob("*.py"))
    named = {each: ".".join(each.relative_to(tmp_path).with_suffix("").parts) for each in files}
    package = SourcePackage(
        "shop", "1.0", tuple((name.removesuffix(".__init__"), each) for each, name in named.items())
    )
    definitions = Definitions([package, SourcePackage("gone", "1", (("gone", tmp_path / "gone.py"),))])
    kinds = {
        "make_bill": FUNCTION,
        "PriceList": CLASS,
        "cheapest": VALUE,
        "total": VALUE,
        "shelf": MODULE,
        "MAX_GOODS": VALUE,
    }
    assert {name: definitions.find_kind("shop", name) for name in kinds} == kinds
    assert definitions.find_kind("shop", "size") is None  # a field may be a parameter
    assert definitions.find_kind("shop", "nothing") is None and definitions.find_kind("nothing", "size") is None
    paths = {
        "shop.stock": MODULE,
        "shop.stock.shelf.find_goods": FUNCTION,
        "shop.bill.PriceList.raise_prices": FUNCTION,
    }
    paths |= {"json.loads": FUNCTION, "os.path": MODULE, "logging.Logger": CLASS}
    assert {path: definitions.find_path_kind(path) for path in paths} == paths
    assert definitions.find_path_kind("shop.nothing.find_goods") is None
    assert definitions.find_suffix_kind("shop", "stock.shelf") == MODULE
    assert definitions.find_suffix_kind("shop", "shelf.ShelfBoard") == CLASS


def test_files_that_do_not_parse_have_no_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text('"""Old."""\nprint "old"\n')
    assert read_docstrings("old", path)[1] == []
    assert read_docstrings("gone", tmp_path / "gone.py")[1] == []


SIZE = SetSize(train=400, dev=60, test=90, package_share=0.9)


def write_distribution(folder: Path, name: str, num_functions: int, start: int = 0) -> None:
    """A package with many functions, every docstring of which has other words."""
    package = folder / name
    package.mkdir(parents=True)
    words = list(
        product("red old big wet dry new raw hot".split(), "cats dogs cows pigs hens bees".split(), "ABCDEFGHIJ")
    )
    source = ['"""Everything about animals is in here."""', "class AnimalBox:\n    pass\n"]
    for color, animal, letter in words[start : start + num_functions]:
        source.append(
            f"def feed_{animal}_{color}_{letter}(meal, much_food):\n"
            f'    """Give `meal` to all {color} {animal} of the farm {letter}oland.\n\n'
            f"    There are many {color} {animal} that live in {letter}oland today.\n\n"
            f"    The {color} {animal} of {letter}oland are kept in an AnimalBox by night.\n"
            f'    """\n'
        )
    text = "\n\n".join(source)
    (package / "__init__.py").write_text(text)
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "RECORD").write_text(f"{name}/__init__.py,,{len(text)}\n")


@pytest.fixture
def _farms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for place, name in enumerate(("farm_a", "farm_b", "farm_c", "farm_d")):
        write_distribution(tmp_path / "site", name, 150 if place < 3 else 30, place * 110)
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    package_docs._index_distributions.cache_clear()
    yield
    package_docs._index_distributions.cache_clear()


@pytest.mark.usefixtures("_farms")
def test_a_set_from_packages(tmp_path: Path) -> None:
    facts = make_code_entities(tmp_path / "set", size=SIZE)
    assert json.loads((tmp_path / "set" / "set.json").read_text()) == facts
    assert sorted(each.name for each in (tmp_path / "set").iterdir()) == [
        "devel.tsv",
        "set.json",
        "test.tsv",
        "train.tsv",
    ]
    assert {each["version"] for each in facts["packages"].values()} == {"1.0"}
    assert facts["splits"]["train"]["sentences"] >= 200
    assert facts["splits"]["train"]["sentences"] <= 400 and facts["splits"]["dev"]["sentences"] <= 60
    assert facts["baselines"]["all_o"] == 0.0 and 0 < facts["baselines"]["word_then_shape"] <= 1
    assert f"{facts['baselines']['shape']:.3f}" in summarize_facts(facts)
    for split in SPLITS:
        described = facts["splits"][split]
        assert described["entities"]["parameter"] > 0 and described["entities"]["class"] > 0
        assert 0 < described["plain_sentences"] <= described["sentences"] / 3 + 1


@pytest.mark.usefixtures("_farms")
def test_a_cache_is_made_once_and_read_back(tmp_path: Path) -> None:
    data = load_code_entities(tmp_path / "cache", size=SIZE)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.endswith(describe_code_entities(size=SIZE)[:16])
    stamp = (folder / "train.tsv").stat().st_mtime_ns
    assert load_code_entities(tmp_path / "cache", size=SIZE) == data
    assert (folder / "train.tsv").stat().st_mtime_ns == stamp
    assert data.name == "code_entities" and data.labels == TYPES and "code_entities was made" in data.notes[0]
    facts = json.loads((folder / "set.json").read_text())
    for split in SPLITS:
        assert len(getattr(data, split)) == facts["splits"][split]["sentences"]
    assert "".join(data.train[0].words).isascii() and data.train[0].document


@pytest.mark.usefixtures("_farms")
def test_the_same_packages_give_the_same_files(tmp_path: Path) -> None:
    names = ("train.tsv", "devel.tsv", "test.tsv", "set.json")
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_code_entities(tmp_path / folder, seed=seed, size=SIZE)
    made = {each: [(tmp_path / each / name).read_bytes() for name in names] for each in "abc"}
    assert made["a"] == made["b"] and made["a"][0] != made["c"][0]
    make_code_entities(tmp_path / "a", size=SIZE)  # as a second process does that lost the race
    assert [(tmp_path / "a" / name).read_bytes() for name in names] == made["a"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "c", "site"]


@pytest.mark.usefixtures("_farms")
def test_fingerprint_changes_with_what_the_set_is_made_of(tmp_path: Path) -> None:
    values = [{}, {"seed": 1}, {"size": SIZE}, {"packages": ["farm_a"]}]
    before = [describe_code_entities(**each) for each in values]  # type: ignore[arg-type]
    assert len(set(before)) == 4
    metadata = tmp_path / "site" / "farm_b-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    package_docs._index_distributions.cache_clear()
    after = [describe_code_entities(**each) for each in values]  # type: ignore[arg-type]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, False, True]


@pytest.mark.usefixtures("_farms")
@pytest.mark.parametrize("names", [["farm_a"], ["farm_d", "farm_a", "farm_b"], ["none"]])
def test_too_little_documentation_is_one_sentence(tmp_path: Path, names: list[str]) -> None:
    size = SetSize(train=120, dev=60, test=90)
    with pytest.raises(CorpusError, match=r"code_entities has only .* it needs 200 .*\.$"):
        make_code_entities(tmp_path / "set", size=size, packages=names)
    assert not list(tmp_path.glob("*set*"))


def check_set(folder: Path, size: SetSize) -> None:
    data = load_code_entities(folder, size=size)
    (made,) = folder.iterdir()
    facts = json.loads((made / "set.json").read_text())
    sentences: dict[tuple[str, ...], str] = {}
    for split in SPLITS:
        examples = getattr(data, split)
        assert 0 < len(examples) <= getattr(size, split)
        for each in examples:
            assert isinstance(each, TaggedSentence) and len(each.words) == len(each.tags)
            assert all(tag == "O" or tag[:2] == "B-" and tag[2:] in TYPES for tag in each.tags)
            assert not any("`" in word or "()" in word or word.startswith("~") for word in each.words)
            assert sentences.setdefault(tuple(map(str.lower, each.words)), split) == split
    assert len(data.train) >= 200
    documents = {
        split: [line.split()[1] for line in (made / name).read_text().splitlines() if line.startswith("-DOCSTART-")]
        for split, name in (("train", "train.tsv"), ("dev", "devel.tsv"), ("test", "test.tsv"))
    }
    packages = [set(each) for each in documents.values()]
    assert not packages[0] & packages[1] | packages[0] & packages[2] | packages[1] & packages[2]
    assert {name: each["split"] for name, each in facts["packages"].items()} == {
        name: split for split, names in documents.items() for name in names
    }
    counts = facts["splits"]["train"]["entities"]
    assert all(counts[kind] > 0 for kind in TYPES)
    assert facts["baselines"]["word_then_shape"] < 0.9  # not to be had without reading


def test_some_of_what_is_installed_makes_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"click", "jinja2", "requests", "packaging", "pyyaml", "filelock", "fsspec", "aiohttp", "huggingface_hub"}
    index = package_docs._index_distributions()
    monkeypatch.setattr(
        package_docs, "_index_distributions", lambda: {name: each for name, each in index.items() if name in names}
    )
    assert {each.name for each in find_packages(["jinja2", "absent"])} == {"jinja2"}
    check_set(tmp_path / "sets", SetSize(train=600, dev=150, test=150, package_share=0.4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_is_installed_makes_a_set(tmp_path: Path) -> None:
    assert "domext_ray" not in [each.name for each in find_packages()]
    check_set(tmp_path / "sets", SetSize())
