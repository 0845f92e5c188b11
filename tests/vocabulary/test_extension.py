"""Extension vocabularies: what is learned, that nothing of the base changes, and which mistakes end in a sentence."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from row_files import SPECIALS, save_wordpiece
from transformers import AutoTokenizer, BertTokenizer

from domext_ray.config.pretrain import PrepareConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.vocabulary.extension import (
    BaseVocabulary,
    ExtensionVocabulary,
    base_token_ids,
    check_appended,
    load_extension,
    read_base_vocabulary,
)
from domext_ray.text.vocabulary.learn import count_new_words, import_words, learn_extension, measure_extension
from domext_ray.text.vocabulary.statistics import format_statistics
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
KNOWN = "is a part of brain the and in with tha ##lam ##us ##ing ##s relay station sensory region cell nerve".split()
PREPARE = PrepareConfig(min_document_chars=5)
TERMS = (
    "thalamus thalamic hypothalamus epithalamus subthalamic neuron neuronal interneuron neurology dopamine "
    "dopaminergic serotonin serotonergic hippocampus hippocampal cortex cortical subcortical α-synuclein µ-opioid Zoë"
).split()
ENDINGS = "genic genesis toxic toxin trophic pathy pathic plasty ectomy scopy tropic kinase".split()


def make_base(folder: Path, *more: str, letters: str = LETTERS, num_unused: int = 0, **options: bool) -> Path:
    entries = [*SPECIALS, *(f"[unused{i}]" for i in range(num_unused)), *".,;:!?'\"()-", *letters]
    entries = dict.fromkeys([*entries, *(f"##{letter}" for letter in letters), *KNOWN, *more])
    return save_wordpiece(folder, entries, model_max_length=64, **options)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "uncased")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(7)
    compounds = [f"{first}{last}" for first in "neuro dopa sero hippo corti".split() for last in ENDINGS]
    draw.shuffle(compounds)
    terms = [*["thalamus", "Thalamus", "Zoë"] * 20, *TERMS * 4, *compounds[:40] * 2, *compounds[40:]]
    known = [word for word in KNOWN if not word.startswith("##")]
    lines = [
        " ".join(draw.choice(terms if draw.random() < 0.4 else known) for _ in range(draw.randrange(5, 25))) + "."
        for _ in range(400)
    ]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read_known(base: Path, num_rows: int = 0) -> BaseVocabulary:
    tokenizer = load_tokenizer(base)
    return read_base_vocabulary("tiny", tokenizer, num_rows or len(tokenizer))


def learn(
    text: Path, base: Path, folder: Path, num_rows: int = 0, prepare: PrepareConfig = PREPARE, **vocab: Any
) -> ExtensionVocabulary:
    known = read_known(base, num_rows)
    return learn_extension(str(text), prepare, VocabConfig(**vocab), known, folder, Place(text.parent / "cache"))


def bring(words: Path | str, base: Path, folder: Path, num_rows: int = 0, **vocab: Any) -> ExtensionVocabulary:
    known = read_known(base, num_rows)
    return import_words(VocabConfig(words=str(words), **vocab), known, folder)


def read_backend(folder: Path) -> dict[str, Any]:
    return json.loads(load_tokenizer(folder).backend_tokenizer.to_str())


@pytest.fixture(scope="module")
def learned(
    local_ray: None, text: Path, base_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> ExtensionVocabulary:
    return learn(text, base_folder, tmp_path_factory.mktemp("learned") / "vocab", size=40)


def test_new_words_complement_the_base(learned: ExtensionVocabulary, base_folder: Path) -> None:
    base, union = load_tokenizer(base_folder), AutoTokenizer.from_pretrained(learned.folder)
    assert base.tokenize("thalamus") == ["tha", "##lam", "##us"]
    assert union.tokenize("Thalamus is a part of brain") == "thalamus is a part of brain".split()
    old, new = base.get_vocab(), union.get_vocab()
    assert {word: i for word, i in new.items() if i < learned.first_id} == old
    assert learned.first_id == len(old) == max(old.values()) + 1
    assert [new[word] for word in learned.words] == list(range(learned.first_id, learned.first_id + 40))
    assert set(learned.words).isdisjoint(old) and len(new) == len(old) + 40
    assert {"thalamus", "neuron", "α", "µ"} <= set(learned.words)


def test_one_tokenizer_that_loads_everywhere(learned: ExtensionVocabulary, base_folder: Path, tmp_path: Path) -> None:
    union = AutoTokenizer.from_pretrained(learned.folder)
    assert isinstance(union, BertTokenizer) and union.model_max_length == 64
    union.save_pretrained(tmp_path / "again")
    assert fingerprint_tokenizer(load_tokenizer(tmp_path / "again")) == fingerprint_tokenizer(union)
    base, made = read_backend(base_folder), read_backend(tmp_path / "again")
    for part in ("normalizer", "pre_tokenizer", "added_tokens", "post_processor", "decoder"):
        assert made[part] == base[part]
    assert {**made["model"], "vocab": 0} == {**base["model"], "vocab": 0}


def test_the_statistics_are_those_of_the_text(learned: ExtensionVocabulary, base_folder: Path, text: Path) -> None:
    record = json.loads((learned.folder / "statistics.json").read_text())
    documents = text.read_text(encoding="utf-8").split("\n")
    rows = {row["num_new"]: row for row in record["sizes"]}
    for folder, row in ((base_folder, rows[0]), (learned.folder, rows[40])):
        tokenizer = load_tokenizer(folder)
        num_words = num_split = num_spelled = num_spelled_pieces = 0
        for document in documents:
            encoding = tokenizer.backend_tokenizer.encode(document, add_special_tokens=False)
            for word in range(max(encoding.word_ids) + 1):
                first, end = encoding.word_to_tokens(word)
                begin, _ = encoding.word_to_chars(word)
                if document[begin].isalnum():
                    num_words += 1
                    num_split += end - first > 1
                    if encoding.tokens[first] != "[UNK]":
                        num_spelled, num_spelled_pieces = num_spelled + 1, num_spelled_pieces + end - first
        assert row["split_frac"] == num_split / num_words
        assert row["pieces_per_word"] == num_spelled_pieces / num_spelled
    assert rows[40]["pieces_per_word"] < rows[0]["pieces_per_word"]


def test_every_new_entry_is_a_token_of_the_text(learned: ExtensionVocabulary, text: Path) -> None:
    tokens = load_tokenizer(learned.folder).tokenize(text.read_text(encoding="utf-8"))
    assert set(learned.words) <= set(tokens)
    record = json.loads((learned.folder / "statistics.json").read_text())
    assert all(count == tokens.count(word) for word, count in record["top_words"])
    assert len(record["top_words"]) == 40
    table = format_statistics(Place(learned.folder))
    assert "0 (the base)" in table and "<- this vocabulary" in table and "thalamus" in table


def test_vocabularies_are_the_same_each_time(
    learned: ExtensionVocabulary, text: Path, base_folder: Path, tmp_path: Path
) -> None:
    again = learn(text, base_folder, tmp_path / "again", size=40)
    for path in sorted(learned.folder.iterdir()):
        assert (again.folder / path.name).read_bytes() == path.read_bytes(), path.name
    many = replace(PREPARE, shard_bytes=4096)
    assert learn(text, base_folder, tmp_path / "many", size=40, prepare=many).words == learned.words
    assert learn(text, base_folder, tmp_path / "few", size=25).words == learned.words[:25], "a smaller one is the start"
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["again", "few", "many"]


def test_a_folder_is_kept_while_its_record_matches(text: Path, base_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vocab"
    first = learn(text, base_folder, folder, size=12)
    before = (folder / "extension.json").stat().st_mtime_ns
    assert learn(text, base_folder, folder, size=12) == first
    assert (folder / "extension.json").stat().st_mtime_ns == before
    assert len(learn(text, base_folder, folder, size=15).words) == 15
    whole = learn(text, base_folder, folder, size=15, whole_words=True)
    assert not any(word.startswith("##") for word in whole.words) and "thalamus" in whole.words
    assert learn(text, base_folder, folder, size=15, whole_words=True, min_frequency=400).words != whole.words


def test_a_cased_base_keeps_its_case(text: Path, tmp_path: Path) -> None:
    letters = LETTERS + LETTERS[:26].upper()
    base = make_base(tmp_path / "cased", letters=letters, do_lower_case=False)
    made = learn(text, base, tmp_path / "vocab", size=50)
    union = load_tokenizer(made.folder)
    assert union.tokenize("thalamus Thalamus Zoë") == ["thalamus", "Thalamus", "Zoë"]
    assert read_backend(made.folder)["normalizer"] == read_backend(base)["normalizer"]
    assert read_backend(base)["normalizer"]["lowercase"] is False


def test_a_chinese_base(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    lines = [
        f"丘脑是大脑的一部分，{'多巴胺' if i % 2 else '血清素'}在丘脑中。使用PCR和CT检查thalamus。" for i in range(60)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    base = make_base(tmp_path / "chinese", *"丘脑是大的一部分在中使用和检查，。")
    made = learn(path, base, tmp_path / "vocab", size=20)
    union = load_tokenizer(made.folder)
    assert set(made.words) >= {*"多巴胺血清素", "pcr", "ct", "thalamus"}
    assert not any(word.startswith("##") and not word.isascii() for word in made.words), "each Han character is a word"
    assert union.tokenize("丘脑的多巴胺，PCR") == [*"丘脑的多巴胺，", "pcr"]
    assert load_tokenizer(base).tokenize("多巴胺") == ["[UNK]"] * 3


def test_rows_beyond_the_tokenizer_are_filled(text: Path, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", num_unused=2)
    num_entries = len(load_tokenizer(base))
    made = learn(text, base, tmp_path / "vocab", size=12, num_rows=num_entries + 3)
    union = load_tokenizer(made.folder)
    assert made.first_id == num_entries + 3
    filled = union.convert_ids_to_tokens(list(range(num_entries, num_entries + 3)))
    assert filled == ["[unused2]", "[unused3]", "[unused4]"]
    assert union.convert_tokens_to_ids(made.words[0]) == num_entries + 3 and len(union) == num_entries + 15
    assert load_extension(made.folder) == made
    with pytest.raises(CorpusError, match=f"ids up to {num_entries - 1} .* the model {num_entries - 1} embedding rows"):
        learn(text, base, tmp_path / "other", size=12, num_rows=num_entries - 1)


def test_more_special_tokens_keep_their_ids(text: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_base(tmp_path / "plain"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENT]", "[REL]"]})
    tokenizer.save_pretrained(tmp_path / "base")
    made = learn(text, tmp_path / "base", tmp_path / "vocab", size=12)
    union = load_tokenizer(made.folder)
    assert union.convert_tokens_to_ids(["[ENT]", "[REL]"]) == tokenizer.convert_tokens_to_ids(["[ENT]", "[REL]"])
    assert union.tokenize("a [ENT] thalamus") == ["a", "[ENT]", "thalamus"]
    assert made.first_id == len(tokenizer)


def test_protected_words_and_earlier_ones_come_first(text: Path, base_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "protected.txt").write_text("amygdala\nbrain\n##ergic\n")
    first = learn(text, base_folder, tmp_path / "first", size=15, protected=str(tmp_path / "protected.txt"))
    assert first.words[:2] == ("amygdala", "##ergic") and len(first.words) == 15
    second = learn(text, base_folder, tmp_path / "second", size=25, extend=str(first.folder))
    assert second.words[:15] == first.words and len(set(second.words)) == 25
    check_appended(first, second)
    for size, message in ((15, "the words of --vocab.extend and --vocab.protected are 15"), (9, "size is 9")):
        with pytest.raises(CorpusError, match=message):
            learn(text, base_folder, tmp_path / "third", size=size, extend=str(first.folder))
    with pytest.raises(CorpusError, match="'nothing' has no extension.json"):
        learn(text, base_folder, tmp_path / "third", size=25, extend="nothing")
    other = make_base(tmp_path / "other", "new")
    with pytest.raises(CorpusError, match="made for --base tiny, whose tokenizer is another"):
        learn(text, other, tmp_path / "third", size=25, extend=str(first.folder))
    assert not (tmp_path / "third").exists()
    only = learn(
        text, base_folder, tmp_path / "only", size=2, min_frequency=9999, protected=str(tmp_path / "protected.txt")
    )
    assert only.words == ("amygdala", "##ergic")


def test_only_appended_words_are_accepted(learned: ExtensionVocabulary) -> None:
    words, first = learned.words, learned.first_id
    check_appended(learned, replace(learned, words=(*words, "more")))
    swapped = (*words[:3], words[4], words[3], *words[5:])
    for changed in (swapped, words[:-1]):
        with pytest.raises(CorpusError, match="does not begin with the words of the earlier one"):
            check_appended(learned, replace(learned, words=changed))
    for change in ({"first_id": first + 1}, {"base_fingerprint": "0"}):
        with pytest.raises(CorpusError, match="both must be of one base"):
            check_appended(learned, replace(learned, **change))


def test_new_entries_in_the_bases_pieces(base_folder: Path) -> None:
    base = load_tokenizer(base_folder)
    pieces = base_token_ids(base, ["thalamus", "##lamus", "##ings", "δ", "##aδ"])
    tokens = [base.convert_ids_to_tokens(ids) for ids in pieces]
    assert tokens == [["tha", "##lam", "##us"], ["##lam", "##us"], ["##ing", "##s"], ["[UNK]"], ["[UNK]"]]


def test_a_list_of_words(base_folder: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("thalamus\r\n##lamic\nα\n", encoding="utf-8-sig")
    made = bring(tmp_path / "words.txt", base_folder, tmp_path / "made")
    assert made.words == ("thalamus", "##lamic", "α") and load_extension(made.folder) == made
    assert load_tokenizer(made.folder).tokenize("Thalamus thalamic α") == ["thalamus", "tha", "##lamic", "α"]
    before = (made.folder / "extension.json").stat().st_mtime_ns
    assert bring(tmp_path / "words.txt", base_folder, tmp_path / "made") == made
    assert (made.folder / "extension.json").stat().st_mtime_ns == before

    again = bring(made.folder, base_folder, tmp_path / "again")
    assert again.words == made.words
    (tmp_path / "more.txt").write_text("neuron\nthalamus\n")
    longer = bring(tmp_path / "more.txt", base_folder, tmp_path / "longer", extend=str(made.folder))
    assert longer.words == (*made.words, "neuron")
    options = VocabConfig(words=str(tmp_path / "more.txt"), extend=str(made.folder))
    known = read_known(base_folder)
    assert count_new_words(options, known) == 4
    assert count_new_words(VocabConfig(size=7, extend=str(made.folder)), known) == 7

    measure_extension(str(text), PREPARE, VocabConfig(), made, Place(tmp_path / "cache"))
    record = json.loads((made.folder / "statistics.json").read_text())
    assert [row["num_new"] for row in record["sizes"]] == [0, 3]
    shown = format_statistics(Place(made.folder))
    assert record["num_unused"] == 0 and "never has" not in shown
    of_old = {name: value for name, value in record.items() if name not in ("num_unused", "unused_examples")}
    (made.folder / "statistics.json").write_text(json.dumps(of_old))
    assert format_statistics(Place(made.folder)) == shown, "as 0.1.0 has it"
    assert record["sizes"][1]["split_frac"] < record["sizes"][0]["split_frac"]
    assert not [path for path in made.folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_holds_no_new_words(base_folder: Path, tmp_path: Path) -> None:
    for skip, says in (
        ((), "has no extension.json"),
        (("known",), "is a vocabulary that was made, .* leave out --vocab.s"),
    ):
        with pytest.raises(CorpusError, match=says):
            bring(base_folder, base_folder, tmp_path / "made", skip=skip)


def test_sizes_and_texts_that_make_no_vocabulary(text: Path, base_folder: Path, tmp_path: Path) -> None:
    poor = make_base(tmp_path / "poor", letters="aeiou")
    with pytest.raises(CorpusError, match=r"--vocab.size is 8; the alphabet that --base tiny lacks takes \d+ entries"):
        learn(text, poor, tmp_path / "made", size=8)
    (tmp_path / "known.txt").write_text("the brain is a part of the region.\n" * 50)
    with pytest.raises(CorpusError, match="has no new word for --base tiny with 5 occurrences"):
        learn(tmp_path / "known.txt", base_folder, tmp_path / "made", size=8)
    assert not (tmp_path / "made").exists()


def test_a_folder_of_other_files_is_left_alone(base_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("thalamus\n")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CorpusError, match="run holds other files; give another --run.name"):
        bring(tmp_path / "words.txt", base_folder, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_damaged_folder_is_made_anew(base_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("thalamus\n")
    made = bring(tmp_path / "words.txt", base_folder, tmp_path / "made")
    (made.folder / "tokenizer.json").write_text("{")
    assert bring(tmp_path / "words.txt", base_folder, tmp_path / "made") == made
    assert load_extension(made.folder) == made


def test_damaged_records(base_folder: Path, tmp_path: Path) -> None:
    assert load_extension(base_folder) is load_extension(tmp_path / "nowhere") is None
    (tmp_path / "words.txt").write_text("thalamus\n##lamic\nneuron\n")
    path = bring(tmp_path / "words.txt", base_folder, tmp_path / "made").folder / "extension.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    words = record["words"]
    for changed, message in (
        ({"words": ["thalamus", "thalamus", "neuron"]}, "have other words"),
        ({"words": words[:2]}, "and the tokenizer beside it have other words"),
        ({"words": [words[1], words[0], words[2]]}, "have other words"),
        ({"words": [*words, "more"]}, "have other words"),
        ({"first_id": 3}, "have other words"),
        ({"words": None}, "is damaged"),
        ({"format": 99}, "has format 99, which a later version .* reads format 2; make it again"),
    ):
        path.write_text(json.dumps({**record, **changed}))
        with pytest.raises(CorpusError, match=message):
            load_extension(path.parent)
    path.write_text(json.dumps(record))
    (path.parent / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match="is damaged"):
        load_extension(path.parent)
