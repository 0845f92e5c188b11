"""Pairs for next-sentence prediction: chunks of one document, halves, partners of another, nothing given away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from transformers import BertTokenizer

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus import pairs, shards
from domext_ray.corpus.manifest import Manifest, read_manifest, verify_shards
from domext_ray.corpus.pairs import CHUNK_SCHEMA, Chunk, build_chunks, choose_sentences, make_pair_drawer
from domext_ray.corpus.rows import RowSettings
from domext_ray.corpus.sampler import Part, Sampler, share_rows
from domext_ray.corpus.shards import prepare_corpus
from domext_ray.corpus.stream import BatchReader, CorpusReader
from domext_ray.errors import CorpusError

NUM_DOCUMENTS = 400
SEQ_LENGTH = 64
FILLERS = ["red", "green", "blue", "run", "##ner", "##s", "very", "house"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
HAN = "天地人你我他山水火日月口手上下大小多少"
TOKENS = [*SPECIALS, *FILLERS, *HAN, "。", *(f"doc{i}" for i in range(NUM_DOCUMENTS))]
FIRST_DOCUMENT_ID = TOKENS.index("doc0")
PREPARE = PrepareConfig(shard_bytes=16384, held_out_frac=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={token: i for i, token in enumerate(TOKENS)})


@pytest.fixture(scope="module")
def tokenizer_dir(tokenizer: BertTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def make_settings(tokenizer: BertTokenizer, seq_length: int = SEQ_LENGTH) -> RowSettings:
    record = tokenizer.backend_tokenizer.to_str()
    return RowSettings(record, tokenizer.cls_token_id, tokenizer.sep_token_id, seq_length, True, False, True)


def make_documents(num_documents: int = NUM_DOCUMENTS, seed: int = 0) -> list[str]:
    """Documents of 2 to 20 sentences of 3 to 17 words; every sentence names its document."""
    random = np.random.default_rng(seed)
    words = ["red", "green", "blue", "runner", "very", "houses"]
    return [
        " ".join(
            f"doc{i} {' '.join(random.choice(words, random.integers(1, 15)))}." for _ in range(random.integers(2, 21))
        )
        for i in range(num_documents)
    ]


def write_chunks(folder: Path, documents: Sequence[str], settings: RowSettings, num_shards: int = 3) -> Manifest:
    """A manifest over the chunks of some documents, made without Ray."""
    records = []
    for i, part in enumerate(np.array_split(np.array(documents, dtype=object), num_shards)):
        chunks = build_chunks(part, settings, i << 32, Counter())
        record = shards._write_shard(folder / f"train-{i}.arrow", chunks, CHUNK_SCHEMA, 3)
        assert record is not None
        records.append(record)
    found = tuple(records)
    return Manifest(
        folder, "f", settings.seq_length, "t", {}, found, found, 1, {}, True, settings.cls_id, settings.sep_id
    )


def read_chunks(manifest: Manifest) -> pa.Table:
    table = pa.concat_tables([pa.ipc.open_file(each).read_all() for each in manifest.paths("train")])
    return table.append_column("row_id", pa.array(np.arange(len(table))))


@pytest.fixture(scope="module")
def manifest(tokenizer: BertTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_chunks(tmp_path_factory.mktemp("chunks"), make_documents(), make_settings(tokenizer))


def find_documents(ids: Sequence[int]) -> set[int]:
    """The documents that a text's sentences name."""
    return {each - FIRST_DOCUMENT_ID for each in ids if each >= FIRST_DOCUMENT_ID}


def test_chunks_hold_every_sentence_once_in_order(tokenizer: BertTokenizer) -> None:
    counts: Counter[str] = Counter()
    documents = make_documents(60)
    chunks = list(build_chunks(documents, make_settings(tokenizer), 7, counts))
    assert counts == {"used": 60}
    for i, document in enumerate(documents):
        own = [each for each in chunks if each.document == 7 + i]
        expected = tokenizer.encode(document, add_special_tokens=False)
        found = np.concatenate([each.ids for each in own]).tolist()
        # Only a last sentence that finds no partner may be missing.
        assert found == expected[: len(found)] and TOKENS[found[-1]] == "."
        assert len(expected) - len(found) <= 17 * 2
    assert sum(len(each.ids) for each in chunks) > 0.98 * sum(
        len(tokenizer.encode(each, add_special_tokens=False)) for each in documents
    )
    for chunk in chunks:
        assert len(chunk.ids) <= SEQ_LENGTH - 3
        assert chunk.sentence_starts[0] and chunk.sentence_starts[chunk.split] and 0 < chunk.split < len(chunk.ids)
        assert [TOKENS[i].startswith("doc") for i in chunk.ids] == chunk.sentence_starts.tolist()
        assert [not TOKENS[i].startswith("##") for i in chunk.ids] == chunk.word_starts.tolist()
    parts = [each.sentence_starts[: each.split].sum() / each.sentence_starts.sum() for each in chunks]
    assert 0.4 < np.mean(parts) < 0.6 and np.std(parts) > 0.15  # the boundary is anywhere


def test_long_sentences_are_cut_before_words(tokenizer: BertTokenizer) -> None:
    document = " ".join(["runners", "red"] * 60)  # one sentence of 240 tokens: run ##ner ##s red
    chunks = list(build_chunks([document], make_settings(tokenizer, 43), 0, Counter()))
    assert np.concatenate([each.ids for each in chunks]).tolist() == tokenizer.encode(
        document, add_special_tokens=False
    )
    for chunk in chunks:
        assert len(chunk.ids) <= 40 and chunk.word_starts[chunk.sentence_starts].all()


def test_documents_without_two_sentences_are_counted(tokenizer: BertTokenizer) -> None:
    documents = ["red green.", "red green. blue house.", "very"]
    counts: Counter[str] = Counter()
    chunks = list(build_chunks(documents, make_settings(tokenizer), 0, counts))
    assert [each.document for each in chunks] == [1]
    assert counts == {"used": 1, pairs.NO_NEXT_SENTENCE: 2}


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([3, 3, 3], [(0, 3)]),
        ([4, 4, 4, 4], [(0, 2), (2, 4)]),
        ([3, 3, 3, 3], [(0, 2), (2, 4)]),  # the fourth does not fit and takes the third along
        ([4, 4, 4], [(0, 2)]),  # the third finds no partner
        ([2], []),
        ([], []),
    ],
)
def test_groups_of_sentences(lengths: list[int], groups: list[tuple[int, int]]) -> None:
    assert pairs._group_sentences(lengths, capacity=10) == groups


@pytest.mark.parametrize(
    ("length", "room", "expected", "gap"),
    [
        (7, 100, (5, 12), 0),  # sentences of 5, 7, 3 and 10 tokens
        (12, 100, (0, 12), 0),
        (14, 100, (0, 15), 1),  # 13 is as close: the first such run
        (25, 24, (5, 25), 5),
        (100, 100, (0, 25), 75),
        (1, 100, (12, 15), 2),
        (2, 2, (12, 14), np.inf),  # nothing fits: the shortest sentence, cut
    ],
)
def test_choose_sentences(length: int, room: int, expected: tuple[int, int], gap: float) -> None:
    starts = np.zeros(25, dtype=bool)
    starts[[0, 5, 12, 15]] = True
    run = choose_sentences(Chunk(np.arange(25), np.ones(25, dtype=bool), starts, 5, 0), length, room)
    assert (run.ids.tolist(), len(run.word_starts), run.gap) == ([*range(*expected)], len(run.ids), gap)


def test_layout_labels_and_documents(manifest: Manifest) -> None:
    chunks = read_chunks(manifest)
    table = make_pair_drawer(manifest, "train", seed=3).draw(chunks, epoch=0)
    assert len(table) == len(chunks) > 1000
    cls, sep = TOKENS.index("[CLS]"), TOKENS.index("[SEP]")
    for pair, chunk in zip(table.to_pylist(), chunks.to_pylist(), strict=True):
        ids, second = pair["input_ids"], pair["second_start"]
        assert len(ids) <= SEQ_LENGTH
        assert [i for i, each in enumerate(ids) if each in (cls, sep)] == [0, second - 1, len(ids) - 1]
        assert pair["word_starts"] == [not TOKENS[i].startswith("##") for i in ids]
        assert pair["row_id"] == chunk["row_id"]
        first_text, second_text = ids[1 : second - 1], ids[second:-1]
        assert first_text == chunk["input_ids"][: chunk["split"]]
        own = find_documents(first_text)
        assert len(own) == 1 and len(find_documents(second_text)) == 1
        if pair["next_sentence"] == 0:
            assert second_text == chunk["input_ids"][chunk["split"] :]
        else:
            assert find_documents(second_text) != own
            assert TOKENS[second_text[0]].startswith("doc") and TOKENS[second_text[-1]] == "."  # whole sentences
    labels = table.column("next_sentence").to_numpy()
    assert abs(labels.mean() - 0.5) < 3 * 0.5 / np.sqrt(len(labels))


def test_the_label_does_not_follow_from_lengths(manifest: Manifest) -> None:
    chunks, labels, lengths = read_chunks(manifest), [], []
    drawer = make_pair_drawer(manifest, "train", seed=0)
    for epoch in range(3):
        table = drawer.draw(chunks, epoch)
        labels.append(table.column("next_sentence").to_numpy())
        total = pa.compute.list_value_length(table.column("input_ids")).to_numpy()
        lengths.append(np.stack([total, total - table.column("second_start").to_numpy()]))
    label, both = np.concatenate(labels), np.concatenate(lengths, axis=1)
    for figure in both:
        for threshold in range(SEQ_LENGTH):
            accuracy = ((figure > threshold) == label).mean()
            assert 0.43 < accuracy < 0.57


def test_pairs_depend_on_seed_epoch_and_row_alone(manifest: Manifest) -> None:
    chunks = read_chunks(manifest)
    drawer = make_pair_drawer(manifest, "train", seed=3)
    whole = drawer.draw(chunks, epoch=1)
    some = pa.array([700, 3, 44, 3])
    assert drawer.draw(chunks.take(some), epoch=1).to_pylist() == whole.take(some).to_pylist()
    assert drawer.draw(chunks.slice(50, 9), epoch=1).to_pylist() == whole.slice(50, 9).to_pylist()
    assert drawer.draw(chunks.slice(0, 0), epoch=1).num_rows == 0
    for other in (drawer.draw(chunks, epoch=2), make_pair_drawer(manifest, "train", seed=4).draw(chunks, epoch=1)):
        same = np.mean([a == b for a, b in zip(whole.to_pylist(), other.to_pylist(), strict=True)])
        assert 0.15 < same < 0.35  # those that are positive in both


def test_a_row_that_finds_no_other_document_stays_as_it_is(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    documents = [" ".join("doc0 red green blue." for _ in range(4000)), "doc1 red. doc1 blue."]
    manifest = write_chunks(tmp_path, documents, make_settings(tokenizer), num_shards=1)
    table = make_pair_drawer(manifest, "train", seed=0).draw(read_chunks(manifest), epoch=0)
    for pair in table.to_pylist():
        names = [find_documents(pair["input_ids"][: pair["second_start"]]), find_documents(pair["input_ids"])]
        assert len(names[1]) == 1 + pair["next_sentence"]
    assert table.column("next_sentence").to_numpy()[:-1].mean() < 0.1


def test_golden_pairs(manifest: Manifest) -> None:
    """Which rows keep their second text is part of every checkpoint's meaning: these numbers must never change."""
    table = make_pair_drawer(manifest, "train", seed=42).draw(read_chunks(manifest).slice(0, 12), epoch=0)
    assert table.column("next_sentence").to_pylist() == [1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1]
    assert table.column("second_start").to_pylist() == [15, 10, 23, 21, 12, 23, 8, 6, 17, 6, 25, 23]
    names = [find_documents(each["input_ids"][each["second_start"] :]).pop() for each in table.to_pylist()]
    assert names == [380, 192, 0, 0, 130, 1, 308, 1, 141, 270, 3, 106]


@pytest.fixture(scope="module")
def prepared(local_ray: None, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("prepared")
    lines = [*make_documents(), *(f"doc{i} only one sentence here" for i in range(30))]
    (folder / "text.txt").write_text("\n".join(lines))
    return prepare_corpus(str(folder / "text.txt"), PREPARE, tokenizer_dir, SEQ_LENGTH, folder / "cache", pairs=True)


def test_preparation_writes_chunks(prepared: Manifest, tokenizer_dir: Path) -> None:
    assert prepared.pairs and (prepared.cls_id, prepared.sep_id) == (2, 3)
    assert prepared.dropped == {pairs.NO_NEXT_SENTENCE: 30} and prepared.num_documents == NUM_DOCUMENTS
    assert len(prepared.train) > 2
    verify_shards(prepared)
    found: dict[int, set[int]] = {}
    for split in shards.SPLITS:
        lengths = []
        for path in prepared.paths(split):
            table = pa.ipc.open_file(path).read_all()
            assert table.schema == CHUNK_SCHEMA
            for row in table.to_pylist():
                lengths.append(len(row["input_ids"]) + 3)
                found.setdefault(row["document"], set()).update(find_documents(row["input_ids"]))
        assert prepared.num_rows(split) == len(lengths) and prepared.num_tokens(split) == sum(lengths)
    assert sorted(found.values(), key=min) == [{i} for i in range(NUM_DOCUMENTS)]  # one number a document
    plain = prepare_corpus(
        str(prepared.folder.parent.parent / "text.txt"), PREPARE, tokenizer_dir, SEQ_LENGTH, prepared.folder.parent
    )
    assert plain.fingerprint != prepared.fingerprint and not plain.pairs
    assert [asdict(each) for each in plain.texts] == [asdict(each) for each in prepared.texts]


def test_pairs_of_a_batch_do_not_depend_on_the_ranks(prepared: Manifest) -> None:
    sampler = Sampler((Part("--corpus", tuple(each.num_rows for each in prepared.train), seed=5),), 16)
    corpora, batches = (CorpusReader.open(prepared, 5),), prepared.num_rows("train") // 16 + 2
    reader = BatchReader(corpora, sampler, (), (), slice(0, 16), 16)
    read = [reader.read(0, sampler.draw(batch)[1]).to_pylist() for batch in range(batches)]
    for world_size in (2, 3):
        shares = [share_rows(16, rank, world_size) for rank in range(world_size)]
        for batch in (0, batches - 1):
            numbers = sampler.draw(batch)[1]
            assert [row for own in shares for row in reader.read(0, numbers[own]).to_pylist()] == read[batch]
    assert read[-1][-1]["epoch"] == 1
    labels = [row["next_sentence"] for batch in read for row in batch]
    assert abs(np.mean(labels) - 0.5) < 0.06


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            [f"doc{i} has only one sentence" for i in range(200)],
            "has 0 documents of two or more sentences in the training split.*set --prepare.document blank_line or file "
            r"\(it is line\)",
        ),
        (
            ["doc0 red. doc0 blue.", *(f"doc{i} has only one sentence" for i in range(200))],
            "next-sentence prediction needs two or more",
        ),
    ],
)
def test_a_corpus_without_partners_is_refused(
    local_ray: None, tokenizer_dir: Path, tmp_path: Path, documents: list[str], message: str
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(documents))
    with pytest.raises(CorpusError, match=message):
        prepare_corpus(str(tmp_path / "text.txt"), PREPARE, tokenizer_dir, SEQ_LENGTH, tmp_path / "cache", pairs=True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("chinese_words", [False, True])
def test_chinese_pairs(local_ray: None, tokenizer_dir: Path, tmp_path: Path, chinese_words: bool) -> None:
    if chinese_words:
        pytest.importorskip("jieba")
    random = np.random.default_rng(0)
    lines = [
        "".join("".join(random.choice(list(HAN), random.integers(3, 12))) + "。" for _ in range(random.integers(2, 12)))
        for _ in range(200)
    ]
    (tmp_path / "zh.txt").write_text("\n".join(lines), encoding="utf-8")
    prepare = replace(PREPARE, chinese_words=chinese_words)
    manifest = prepare_corpus(str(tmp_path / "zh.txt"), prepare, tokenizer_dir, 48, tmp_path / "cache", pairs=True)
    assert read_manifest(manifest.folder) == manifest
    table = make_pair_drawer(manifest, "train", seed=0).draw(read_chunks(manifest), epoch=0)
    labels = table.column("next_sentence").to_numpy()
    assert len(labels) > 150 and abs(labels.mean() - 0.5) < 0.12
    for pair in table.to_pylist():
        texts = ["".join(TOKENS[i] for i in pair["input_ids"][1 : pair["second_start"] - 1])]
        texts.append("".join(TOKENS[i] for i in pair["input_ids"][pair["second_start"] : -1]))
        homes = [{i for i, line in enumerate(lines) if text in line} for text in texts]
        assert homes[0] and homes[1]
        assert (sum(texts[0] + texts[1] in line for line in lines) > 0) == (pair["next_sentence"] == 0)
        assert texts[0].endswith("。") and texts[1].endswith("。")
    starts = np.concatenate(table.column("word_starts").to_pylist())
    assert (starts.mean() < 1.0) == chinese_words
