"""One mask set for many models: the same words, the same figures, the interval of a known accuracy, mistakes told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_runs import make_run
from conftest import SHAPE, WORDS, make_random_model
from job_calls import call_job
from matplotlib.image import imread
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, BertModel, BertTokenizer

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PrepareConfig, PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, CorpusError, RunError
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.models.masked_lm import hash_model, load_masked_lm
from domext_ray.storage import Place
from domext_ray.studies.forgetting.forgetting import (
    Forgetting,
    measure_forgetting,
    predict_masked,
    score_predictions,
)
from domext_ray.studies.forgetting.mask_set import GeneralText, MaskSet, build_mask_set, choose_texts
from domext_ray.studies.forgetting.report import format_forgetting, to_results, write_forgetting
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer

NEW_WORD = "gluconate"
PREPARE = PrepareConfig(min_document_chars=1)


def write_corpus(folder: Path, num_texts: int = 60) -> str:
    """Two files of sentences from words that the tiny bases know, and one that only an extended one has whole."""
    rng = np.random.default_rng(0)
    for name in ("letters", "news"):
        lines = []
        for _ in range(num_texts // 2):
            words = [*rng.choice(WORDS, size=rng.integers(6, 25)), NEW_WORD, "quixotic"]
            rng.shuffle(words)
            lines.append(" ".join(words) + " .")
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{folder / 'letters.txt'},{folder / 'news.txt'}"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path)


@pytest.fixture(scope="session")
def other_base_folder(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the tiny base's tokenizer."""
    folder = tmp_path_factory.mktemp("bases") / "other-bert"
    shutil.copytree(tiny_base_folder, folder)
    make_random_model(BertForMaskedLM, BertConfig.from_pretrained(folder), seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def extended_base_folder(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one more word."""
    folder = tmp_path_factory.mktemp("bases") / "extended-bert"
    vocabulary = load_tokenizer(tiny_base_folder).get_vocab()
    vocabulary[NEW_WORD] = len(vocabulary)
    BertTokenizer(vocab=vocabulary, model_max_length=128).save_pretrained(folder)
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=128, **SHAPE)
    make_random_model(BertForMaskedLM, config, seed=2).save_pretrained(folder)
    return folder


def build(
    texts: list[GeneralText], *folders: Path, frac: float = 0.3, length: int = 128, shared: bool = True
) -> MaskSet:
    tokenizers = {str(folder): load_tokenizer(folder) for folder in folders}
    return build_mask_set(texts, tokenizers, mask_frac=frac, max_length=length, shared_words=shared)


def unmask(masks: MaskSet, folder: Path) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """The texts with labels put back, the scored words, and what a model with this tokenizer sees, as tokens."""
    tokenizer = load_tokenizer(folder)
    restored, scored, seen = [], [], []
    for row in masks.rows[fingerprint_tokenizer(tokenizer)]:
        ids = row.input_ids.copy()
        assert (ids[row.places] == tokenizer.mask_token_id).all()
        ids[row.places] = row.labels
        restored.append(tokenizer.decode(ids[1:-1]))
        scored.append(tokenizer.convert_ids_to_tokens(row.labels.tolist()))
        seen.append(tokenizer.convert_ids_to_tokens(row.input_ids.tolist()))
    return restored, scored, seen


def test_texts_are_drawn_by_their_hash(corpus: str) -> None:
    texts = choose_texts(corpus, PREPARE, num_texts=25, seed=0)
    assert len({each.text for each in texts}) == 25
    assert {each.source for each in texts} == {"letters", "news"}
    turned = ",".join(reversed(corpus.split(",")))
    assert choose_texts(turned, PREPARE, num_texts=25, seed=0) == texts
    assert choose_texts(corpus, PREPARE, num_texts=10, seed=0) == texts[:10]
    assert choose_texts(corpus, PREPARE, num_texts=25, seed=1) != texts
    assert len(choose_texts(f"{corpus},{corpus}", PREPARE, num_texts=1000, seed=0)) == 60  # each text once


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "news.txt").write_text(f"the {folder} house\n")
    texts = choose_texts(str(tmp_path), PREPARE, num_texts=5, seed=0)
    assert {each.source for each in texts} == {str(tmp_path / each / "news.txt") for each in ("a", "b")}
    (tmp_path / "short.txt").write_text("no\nyes\n")
    with pytest.raises(CorpusError, match="has no text of 20 characters or more"):
        choose_texts(str(tmp_path / "short.txt"), PrepareConfig(), num_texts=5, seed=0)


def test_equal_tokenizers_get_the_very_same_masked_tokens(
    corpus: str, tiny_base_folder: Path, other_base_folder: Path
) -> None:
    texts = choose_texts(corpus, PREPARE, num_texts=60, seed=0)
    masks = build(texts, tiny_base_folder, other_base_folder)
    assert len(masks.rows) == 1 and not masks.is_shared
    assert masks.hash_rows(*masks.rows) == build(texts, tiny_base_folder).hash_rows(*masks.rows)
    assert masks.hash_rows(*masks.rows) == build(texts, other_base_folder).hash_rows(*masks.rows)
    tokenizer = load_tokenizer(tiny_base_folder)
    restored, _, seen = unmask(masks, tiny_base_folder)
    assert set(restored) <= {tokenizer.decode(tokenizer.encode(each.text)[1:-1]) for each in texts}
    num_tokens = sum(len(each) - 2 for each in seen)
    assert masks.counts.sum() == sum(each.count("[MASK]") for each in seen)
    assert masks.counts.sum() / num_tokens == pytest.approx(0.3, abs=0.03)
    assert "the very same ones for all models" in masks.describe()


def test_differing_vocabularies_share_the_masked_words(
    corpus: str, tiny_base_folder: Path, extended_base_folder: Path, other_base_folder: Path
) -> None:
    """A further model of a known tokenizer changes nothing."""
    texts = choose_texts(corpus, PREPARE, num_texts=60, seed=0)
    masks = build(texts, tiny_base_folder, extended_base_folder)
    assert masks.is_shared
    _, scored, seen = unmask(masks, tiny_base_folder)
    _, other_scored, other_seen = unmask(masks, extended_base_folder)
    assert scored == other_scored  # one mask set
    assert {word for each in scored for word in each} <= {*WORDS}  # no new word, no cut one, no punctuation
    assert sum(map(len, scored)) < masks.num_masked
    num_hidden = 0
    for tokens, other_tokens in zip(seen, other_seen, strict=True):
        other = [each for each in other_tokens if each != "[MASK]"]
        # What is visible is the same text: the new word's pieces are all masked or none is.
        assert "".join(each.removeprefix("##") for each in tokens if each != "[MASK]") == "".join(
            each.removeprefix("##") for each in other
        )
        num_hidden += NEW_WORD not in other_tokens
        assert (NEW_WORD in other_tokens) == ("luconate" in "".join(tokens).replace("##", ""))
    assert 0 < num_hidden < len(seen)
    assert "one token in every vocabulary" in masks.describe()
    three = build(texts, tiny_base_folder, extended_base_folder, other_base_folder)
    assert {each: masks.hash_rows(each) for each in masks.rows} == {each: three.hash_rows(each) for each in three.rows}


def test_long_texts_are_cut_at_the_same_character(tiny_base_folder: Path, extended_base_folder: Path) -> None:
    words = [WORDS[i % len(WORDS)] if i % 4 else NEW_WORD for i in range(60)]
    text = GeneralText(" ".join(words), "long", 7)
    masks = build([text], tiny_base_folder, extended_base_folder, frac=0.6, length=40)
    rows = [unmask(masks, folder)[2][0] for folder in (tiny_base_folder, extended_base_folder)]
    assert len(rows[0]) <= 40
    visible = ["".join(each for each in row if each != "[MASK]").replace("##", "") for row in rows]
    assert visible[0] == visible[1]
    # The extended tokenizer could have read on.
    assert len(rows[1]) < len(rows[0])


def test_models_that_differ_too_much_are_refused(
    corpus: str, tiny_base_folder: Path, tiny_roberta_folder: Path, extended_base_folder: Path
) -> None:
    texts = choose_texts(corpus, PREPARE, num_texts=20, seed=0)
    with pytest.raises(ConfigError, match="have different tokenizers.*--shared_words true"):
        build(texts, tiny_base_folder, extended_base_folder, shared=False)
    strange = [replace(each, text=f"{NEW_WORD} quixotic " * 8) for each in texts]
    with pytest.raises(ConfigError, match="vocabularies too different to compare: of [0-9]+ drawn words 0 are"):
        build(strange, tiny_base_folder, extended_base_folder)
    with pytest.raises(CorpusError, match="no token of --corpus is masked"):
        build(texts[:1], tiny_base_folder, frac=1e-9)


def test_other_kinds_of_tokenizers_are_compared_by_words(tiny_base_folder: Path, tiny_roberta_folder: Path) -> None:
    """Whichever is named first: byte-level BPE counts the space before a word to it, and spells it with a mark.

    WordPiece reads cat2dog as one word, byte-level BPE as three: the words behind it have other numbers.
    """
    words, rng = load_tokenizer(tiny_roberta_folder).get_vocab(), np.random.default_rng(1)
    common = [each for each in WORDS if f"Ġ{each}" in words]
    texts = [GeneralText(" ".join(["x", "cat2dog", *rng.choice(common, size=12)]), "a", i) for i in range(20)]
    both = (tiny_base_folder, tiny_roberta_folder)
    masks, swapped = (build(texts, *order) for order in (both, both[::-1]))
    scored, other_scored = unmask(masks, tiny_base_folder)[1], unmask(masks, tiny_roberta_folder)[1]
    assert scored == [[each.removeprefix("Ġ") for each in row] for row in other_scored]
    assert scored == unmask(swapped, tiny_base_folder)[1]


def test_predictions_are_those_of_transformers(corpus: str, tiny_base_folder: Path) -> None:
    masks = build(choose_texts(corpus, PREPARE, num_texts=30, seed=0), tiny_base_folder)
    rows = masks.rows[next(iter(masks.rows))]
    model, tokenizer = load_masked_lm(str(tiny_base_folder))
    reference = BertForMaskedLM.from_pretrained(tiny_base_folder).eval()
    expected = []
    with torch.no_grad():
        for row in rows:
            found = reference(torch.from_numpy(row.input_ids)[None]).logits[0].argmax(dim=-1).numpy()
            expected.append(found[row.places] == row.labels)
    for batch_size in (1, 7):
        found = predict_masked(model, rows, tokenizer.pad_token_id, batch_size)
        assert np.array_equal(found, np.concatenate(expected))


def make_config(corpus: str, output: Path, **models: Path) -> ForgettingConfig:
    named = ",".join(f"{name}={folder}" for name, folder in models.items())
    return ForgettingConfig(models=named, corpus=corpus, output=str(output), num_texts=50, prepare=PREPARE)


def test_a_comparison_from_end_to_end(
    corpus: str, tmp_path: Path, tiny_base_folder: Path, other_base_folder: Path
) -> None:
    output = tmp_path / "out"
    first = measure_forgetting(make_config(corpus, output, base=tiny_base_folder))
    config = make_config(corpus, output, base=tiny_base_folder, other=other_base_folder)
    result = measure_forgetting(config)
    assert result.models[0].score.values == first.models[0].score.values
    text = write_forgetting(config, result)
    assert (output / "forgetting.md").read_text() == text
    results = json.loads((output / "results.json").read_text())
    assert list(results["models"]) == ["base", "other"]
    other = results["models"]["other"]
    assert other["lost"]["accuracy"]["difference"] == pytest.approx(
        results["models"]["base"]["accuracy"] - other["accuracy"]
    )
    shares = [results["sources"][each]["scored_tokens"] / results["scored_tokens"] for each in ("letters", "news")]
    by_source = [other["by_source"][each] for each in ("letters", "news")]
    assert np.dot(shares, by_source) == pytest.approx(other["accuracy"])
    assert imread(output / "forgetting.png").shape[0] > 100
    assert "### letters" in text and "| other |" in text
    again = measure_forgetting(replace(config, batch_size=3, output=str(tmp_path / "again")))
    assert to_results(again)["models"] == to_results(result)["models"]
    assert not list(output.rglob("*.tmp"))


def test_the_interval_covers_a_known_accuracy(corpus: str, tiny_base_folder: Path) -> None:
    masks = build(choose_texts(corpus, PREPARE, num_texts=60, seed=0), tiny_base_folder)
    rng = np.random.default_rng(0)
    num_tokens, covered = int(masks.counts.sum()), 0
    for seed in range(100):
        is_right = rng.random(num_tokens) < 0.4
        score = score_predictions(is_right, masks)
        assert score.get("accuracy") == is_right.mean()
        low, high = score.describe(num_resamples=200, seed=seed)["intervals"]["accuracy"]
        covered += low <= 0.4 <= high
    assert covered >= 86


def test_a_run_and_its_export_are_one_model(tiny_base_folder: Path, tmp_path: Path) -> None:
    method = MethodConfig(name="lora", trains="extensions", heads=0, ffn_units=0, lora_rank=2)
    config = PretrainConfig(base=str(tiny_base_folder), method=method)
    base = load_base(str(tiny_base_folder))
    model = ModelSpec(base, method).build()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.fill_(0.05)
    run_dir = make_run(tmp_path / "run", config, model, base)
    load_tokenizer(tiny_base_folder).save_pretrained(run_dir / "tokenizer")
    exported = export_run(Place(run_dir), Place(run_dir / "export"))
    hashes = {hash_model(load_masked_lm(str(each))[0]) for each in (run_dir, exported)}
    assert len(hashes) == 1
    assert hashes != {hash_model(load_masked_lm(str(tiny_base_folder))[0])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = ForgettingConfig(models=("a=b",), corpus=str(tmp_path), output=str(tmp_path / "out"), use_gpu=True)
    with pytest.raises(ConfigError, match="--use_gpu is True, and torch finds no GPU; leave it out"):
        measure_forgetting(config)
    assert not (tmp_path / "out").exists()


def test_models_without_a_head_are_refused(tiny_base_folder: Path, tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(tiny_base_folder)
    for name, model_class in (("encoder", BertModel), ("tagger", BertForTokenClassification)):
        model_class(config).save_pretrained(tmp_path / name)
        load_tokenizer(tiny_base_folder).save_pretrained(tmp_path / name)
        with pytest.raises(BaseModelError, match=r"--models '.*' .*has no masked-LM head"):
            load_masked_lm(str(tmp_path / name))
    with pytest.raises(BaseModelError, match=r"--models '.*nowhere/at/all' does not exist"):
        load_masked_lm(str(tmp_path / "nowhere/at/all"))
    (tmp_path / "tuned" / "trainings").mkdir(parents=True)
    with pytest.raises(BaseModelError, match="was fine-tuned and has no masked-LM head"):
        load_masked_lm(str(tmp_path / "tuned"))
    (tmp_path / "config.yaml").write_text("{}\n")
    with pytest.raises(RunError, match="no (usable )?checkpoint"):
        load_masked_lm(str(tmp_path))


def test_rows_must_fit_every_model(corpus: str, tiny_base_folder: Path, tmp_path: Path) -> None:
    config = make_config(corpus, tmp_path / "out", base=tiny_base_folder)
    with pytest.raises(ConfigError, match="--max_length is 129; the model 'base' of --models has positions for 128"):
        measure_forgetting(replace(config, max_length=129))


def test_models_are_named() -> None:
    config = ForgettingConfig(
        models=("base=general-mini", "runs/af/", "runs/lora/export", "runs/a=b", "org/bert"), corpus="x"
    )
    assert config.named_models == (
        ("base", "general-mini"),
        ("af", "runs/af/"),
        ("lora", "runs/lora/export"),
        ("a=b", "runs/a=b"),
        ("bert", "org/bert"),
    )


def test_wrong_options_are_told(tiny_base_folder: Path, tmp_path: Path) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"models": ""}, "--models is ''"),
        ({"models": "a=x,a=y"}, "models of different names"),
        ({"models": "a=,b=y"}, "it must be models such as"),
        ({"corpus": " "}, "--corpus is ' '"),
        ({"mask_frac": 1.0}, "--mask_frac is 1.0; it must be between 0 and 1"),
        ({"num_texts": 0}, "--num_texts is 0; it must be 1 or more"),
        ({"seed": -1}, "--seed is -1"),
    ]
    for options, message in mistakes:
        with pytest.raises(ConfigError, match=message):
            ForgettingConfig(**{"models": "a=b", "corpus": "c", **options})
    flags = ("--models", str(tiny_base_folder), "--corpus", str(tmp_path / "no.txt"), "--output", str(tmp_path / "out"))
    code, _, err = call_job("evaluate_forgetting", *flags)
    assert code == 2 and err.splitlines()[-1].startswith("error: --corpus")


def test_one_source_needs_no_table_of_its_own(tmp_path: Path, tiny_base_folder: Path) -> None:
    corpus = write_corpus(tmp_path).split(",")[0]
    result: Forgetting = measure_forgetting(make_config(corpus, tmp_path / "out", base=tiny_base_folder))
    assert "###" not in format_forgetting(result)
    assert "all that the corpus has, where --num_texts is 50" in format_forgetting(result)
    assert set(result.models[0].score.values) == {"accuracy"}
