"""New words beside byte-level BPE: the base's texts stay as they are, and a new word is one token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_tokenizers import MAKERS, PROSE, learn_bytes, save_xlm_roberta
from row_files import SPECIALS, make_wordpiece
from test_extension import bring as bring_list
from test_extension import learn
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, RobertaConfig

from domext_ray.config.pretrain import PrepareConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.corpus.rows import RowSettings, tokenize_sentences
from domext_ray.text.data.documents import split_sentences
from domext_ray.text.vocabulary.extension import ExtensionVocabulary, base_token_ids, load_extension
from domext_ray.text.vocabulary.family import PREFIX, tokenizer_family
from domext_ray.text.vocabulary.learn import measure_extension
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer, make_backend

PREPARE = PrepareConfig(min_document_chars=5)
TERMS = ["thalamus", "thal", "epithalamus", "Naïveté", "αopioid", "##thalamus", "##dopamine", "中脑"]
"""Words that the prose does not have."""
ODD_TEXTS = [
    "",
    " ",
    "thalamuses hypothalamus subthalamus_2 thalamic thalamusthalamus naïveté 中脑里 大中脑",
    "  two  spaces   and    more  ",
    "tab\tline\nend\r\n\u00a0no-break \u200b zero width \u2028 line",
    "don't it's I'LL we've (parens) [brackets] {x1} a-b-c 3.14 1,000 $5.00 100% #tag @name e-mail@host.org",
    "<s> </s> <mask> [MASK] [CLS] <|endoftext|> |||IP_ADDRESS||| [unused0] [unused3] Ġword ▁word _▁_ ▁▁",
    "ﬁne ½ ² Ⅳ ① Å e\u0301 n\u0303 한국어 ไทย हिन्दी العربية עברית 日本語 中文。你好，世界！",
    "😀👍🏽 emoji\U0001f600joined \ud7ff \ufffd",
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make(folder / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="module", params=list(MAKERS))
def base_folder(request: pytest.FixtureRequest, bases: dict[str, Path]) -> Path:
    return bases[request.param]


def bring(words: list[str], base: Path, folder: Path, more_rows: int = 0, **vocab: Any) -> ExtensionVocabulary:
    path = folder.parent / f"{folder.name}.txt"
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return bring_list(path, base, folder, count_rows(base) + more_rows, **vocab)


def count_rows(base: Path) -> int:
    return max(load_tokenizer(base).get_vocab().values()) + 1


@pytest.fixture(scope="module")
def made(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtensionVocabulary:
    return bring(TERMS, base_folder, tmp_path_factory.mktemp("made") / "vocab", more_rows=3)


def read(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[Any, ...]:
    found = make_backend(tokenizer).encode(text)
    return found.ids, found.offsets, found.word_ids, found.special_tokens_mask


def show(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The texts of the tokens."""
    found = make_backend(tokenizer).encode(text, add_special_tokens=False)
    return [text[first:end] for first, end in found.offsets]


def test_texts_without_new_words_are_cut_as_before(made: ExtensionVocabulary, base_folder: Path) -> None:
    base, union = load_tokenizer(base_folder), load_tokenizer(made.folder)
    for text in [*PROSE, *ODD_TEXTS, *(f"{first} {end}" for first, end in zip(PROSE, ODD_TEXTS, strict=False))]:
        assert read(union, text) == read(base, text), text
        ids = base(text).input_ids
        assert union(text).input_ids == ids and union.decode(ids) == base.decode(ids)


def test_words_of_the_prose_as_new_words_change_nothing_else(base_folder: Path, tmp_path: Path) -> None:
    """Where a new word's pieces are put back, the base's tokens are there."""
    base = load_tokenizer(base_folder)
    family, backend = tokenizer_family(base), make_backend(base)
    entries = sorted({entry for line in PROSE for entry in family.words(line)})
    names = [name for entry in entries if (name := entry.lstrip("Ġ")).isalpha() and name in family.to_name(entry)]
    words = [word for word in dict.fromkeys(names[::3]) if family.to_entry(word) not in base.get_vocab()]
    extension = bring(words, base_folder, tmp_path / "vocab")
    union, pieces = load_tokenizer(extension.folder), base_token_ids(base, words)
    other = make_backend(union)
    new = {family.to_entry(word) for word in words}
    num_with = num_without = 0
    for line in PROSE:
        before, after = backend.encode(line), other.encode(line)
        has_new = not new.isdisjoint(family.words(line))
        assert has_new == (max(after.ids) >= extension.first_id)
        num_with, num_without = num_with + has_new, num_without + (not has_new)
        put_back = [
            piece for i in after.ids for piece in (pieces[i - extension.first_id] if i >= extension.first_id else [i])
        ]
        assert put_back == before.ids
        assert len(after.ids) < len(before.ids) or not has_new
        assert union.decode(after.ids) == base.decode(before.ids)
    assert len(words) > 50 and num_with > 100 and num_without > 20


def test_a_new_word_is_one_token_with_its_place_and_its_text(made: ExtensionVocabulary, base_folder: Path) -> None:
    union, base = load_tokenizer(made.folder), load_tokenizer(base_folder)
    text = "the thalamus, epithalamus; Naïveté (thalamus) thal-x thalamuses _thal 中脑"
    after, before = (make_backend(tokenizer).encode(text, add_special_tokens=False) for tokenizer in (union, base))
    new = [place for place, i in enumerate(after.ids) if i >= made.first_id]
    assert [text[slice(*after.offsets[place])].strip() for place in new] == [
        "thalamus", "epithalamus", "Naïveté", "thalamus", "thal", "中脑"
    ]  # fmt: skip
    starts, ends = zip(*before.offsets, strict=True)
    for place in new:
        first, end = after.offsets[place]
        assert first in starts and end in ends, "a word has the place of its pieces"
        assert after.word_ids[place] in before.word_ids
        assert union.decode([after.ids[place]]).strip() == text[first:end].strip()
    assert max(after.word_ids) == max(before.word_ids)
    plain = "the thalamus, epithalamus thalamuses thal, thal."
    back = [tokenizer.decode(tokenizer(plain).input_ids, skip_special_tokens=True) for tokenizer in (union, base)]
    assert back[0] == back[1] and back[0].strip() == plain


def test_a_new_word_is_masked_as_one_word(made: ExtensionVocabulary, base_folder: Path) -> None:
    tokenizers = load_tokenizer(made.folder), load_tokenizer(base_folder)
    sentence = "We read of the thalamus and the Naïveté of it"
    starts = []
    for tokenizer in tokenizers:
        ends = tokenizer.cls_token_id, tokenizer.sep_token_id
        settings = RowSettings(tokenizer.backend_tokenizer.to_str(), *ends, 32, True, False)
        ((ids, begins),) = tokenize_sentences([sentence], settings)
        starts.append(begins.tolist())
        assert len(ids) == len(begins)
    assert sum(starts[0]) == sum(starts[1]) == len(sentence.split()) and len(starts[0]) < len(starts[1])


def test_one_tokenizer_that_loads_everywhere(made: ExtensionVocabulary, base_folder: Path, tmp_path: Path) -> None:
    base, union = load_tokenizer(base_folder), AutoTokenizer.from_pretrained(made.folder)
    assert load_extension(made.folder) == made
    assert not {"vocab.json", "merges.txt"} & {file.name for file in made.folder.iterdir()}
    union.save_pretrained(tmp_path / "again")
    RobertaConfig().save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert fingerprint_tokenizer(again) == fingerprint_tokenizer(union)
    for name in ("all_special_ids", "all_special_tokens", "model_input_names", "model_max_length", "padding_side"):
        assert getattr(again, name) == getattr(union, name) == getattr(base, name)
    texts = ["one thalamus", "a longer row of it"]
    assert again(texts, padding=True) == union(texts, padding=True)
    assert union("a <mask> b").input_ids == base("a <mask> b").input_ids


def test_ids_follow_the_bases_rows(made: ExtensionVocabulary, base_folder: Path, tmp_path: Path) -> None:
    base, union = load_tokenizer(base_folder), load_tokenizer(made.folder)
    family, vocabulary = tokenizer_family(base), union.get_vocab()
    assert made.first_id == count_rows(base_folder) + 3 and len(union) == made.first_id + len(made.words)
    assert [vocabulary[family.to_entry(word)] for word in made.words] == list(range(made.first_id, len(union)))
    assert {entry: i for entry, i in vocabulary.items() if entry in base.get_vocab()} == base.get_vocab()
    longer = bring(["amygdala"], base_folder, tmp_path / "longer", more_rows=3, extend=str(made.folder))
    assert longer.words == (*made.words, "amygdala")
    with pytest.raises(CorpusError, match="whose tokenizer is another"):
        bring(["amygdala"], base_folder, tmp_path / "other", more_rows=4, extend=str(made.folder))


def test_new_words_in_the_bases_pieces(made: ExtensionVocabulary, base_folder: Path) -> None:
    base = load_tokenizer(base_folder)
    for word, pieces in zip(made.words, base_token_ids(base, made.words), strict=True):
        assert pieces and max(pieces) < count_rows(base_folder)
        if base.unk_token_id not in pieces:
            mark = "" if word.startswith(PREFIX) else " "
            assert base.decode(pieces).strip() == word.removeprefix(PREFIX), mark


def test_lists_with_a_mistake(bases: dict[str, Path], tmp_path: Path) -> None:
    mistakes = [
        ("[MASK]", "is a special token"),
        ("the", "is in the base's vocabulary already"),
        ("co-opt", "is 3 words to the base's tokenizer"),
        ("basal ganglia", "is 2 words"),
        ("", "is empty"),
        ("x" * 101, "more than 100 characters"),
    ]
    cases = [(name, *mistake) for name in bases for mistake in mistakes]
    cases += [("roberta", "thalamus2", "is 2 words"), ("roberta with a space first", "##co-opt", "is 3 words")]
    for name, word, message in cases:
        with pytest.raises(CorpusError, match=message):
            bring(["amygdala", word], bases[name], tmp_path / "made")
        assert not (tmp_path / "made").exists(), name


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(3)
    terms = [f"{first}{last}" for first in ("neuro", "dopa", "Sero", "hippo") for last in ("genic", "toxin", "ectomy")]
    lines = []
    for line in PROSE:
        words = line.split(" ")
        for _ in range(3):
            term = draw.choice(terms)
            words.insert(draw.randrange(1, len(words)), draw.choice([term, f"{term},", f"({term})", f"{term}-like"]))
        lines.append(" ".join(words))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_words_are_learned_in_the_bases_notion_of_them(
    base_folder: Path, text: Path, tmp_path: Path, local_ray: None
) -> None:
    num_rows = count_rows(base_folder)
    learned = learn(text, base_folder, tmp_path / "vocab", num_rows, size=30)
    assert {"neurogenic", "Serotoxin", "hippoectomy"} <= set(learned.words) and "serotoxin" not in learned.words
    assert "##neurogenic" in learned.words
    assert learn(text, base_folder, tmp_path / "fewer", num_rows, size=12).words == learned.words[:12]
    union = load_tokenizer(learned.folder)
    family, backend = tokenizer_family(union), make_backend(union)
    sentences = [part for line in text.read_text(encoding="utf-8").split("\n") for part in split_sentences(line)]
    usage = np.zeros(len(union), dtype=np.int64)
    for sentence in sentences:
        np.add.at(usage, backend.encode(sentence, add_special_tokens=False).ids, 1)
    ids = union.get_vocab()
    counts = {word: int(usage[ids[family.to_entry(word)]]) for word in learned.words}
    assert min(counts.values()) >= 5, "every new word is a token of the text"
    record = json.loads((learned.folder / "statistics.json").read_text())
    assert {word: count for word, count in record["top_words"]} == counts
    learn(text, base_folder, tmp_path / "again", num_rows, size=30)
    for path in learned.folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    measure_extension(str(text), PREPARE, VocabConfig(), learned, Place(tmp_path / "cache"))
    assert json.loads((learned.folder / "statistics.json").read_text())["sizes"][:2] == record["sizes"][:2]


def make_bytes(**options: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": {**learn_bytes(["<unk>"]), **options}}))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_tokenizers_that_take_no_new_words(tmp_path: Path) -> None:
    gemma = make_bytes()
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    unsplit = make_bytes()
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lost = make_bytes()
    lost.add_tokens(["thalamus"])
    pieces = make_wordpiece([*SPECIALS, "a"]).backend_tokenizer
    spaced = Tokenizer.from_str(pieces.to_str().replace("BertPreTokenizer", "Whitespace"))
    pieces.add_tokens(["thalamus"])
    unigram = load_tokenizer(save_xlm_roberta(tmp_path)).backend_tokenizer
    others = "give a base with WordPiece .* or leave --vocab.size 0 and --vocab.words"
    tokenizer_family(make_bytes().to_str(), "base")
    tokenizer_family(make_bytes(ignore_merges=True).to_str(), "base")
    for tokenizer, message in [
        (gemma, "is a BPE model that is not byte-level, and new words beside it would change other texts"),
        (make_bytes(byte_fallback=True), "is a BPE model that is not byte-level"),
        (make_bytes(dropout=0.1), "drops merges at random"),
        (unsplit, "does not cut text into words before its BPE model"),
        (lost, "has the entry 'thalamus', which its merges do not lead to"),
        (Tokenizer(models.WordLevel({"a": 0}, "a")), "is a WordLevel model, and new words"),
        (unigram, f"--base base is a Unigram model, .* {others}"),
        (spaced, "has the pre-tokenizer Whitespace in place of BertPreTokenizer, and new words"),
        (pieces, "has 1 added tokens .* the first is 'thalamus'"),
    ]:
        with pytest.raises(CorpusError, match=message):
            tokenizer_family(tokenizer.to_str(), "base")


def test_new_words_stand_beside_earlier_ones(bases: dict[str, Path], tmp_path: Path) -> None:
    made = bring(["thalamus"], bases["roberta"], tmp_path / "bytes")
    more = bring(["amygdala"], made.folder, tmp_path / "more bytes")
    assert show(load_tokenizer(more.folder), " thalamus amygdala") == ["thalamus", "amygdala"]
