"""Masked words of held-out text: chosen by a fixed rule, predicted by the model before and after."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import make_run

from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import ObjectiveConfig, PretrainConfig, TrainConfig, VocabConfig
from domext_ray.model.base import load_base
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS
from domext_ray.model.spec import ModelSpec, build_base
from domext_ray.report.examples import NUM_EXAMPLES, NUM_GUESSES, Guess, choose_sentences, make_examples, predict
from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import FileRecord, Manifest
from domext_ray.text.vocabulary.extension import read_base_vocabulary
from domext_ray.text.vocabulary.learn import import_words
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.router import RouterRecord, save_routers

SENTENCES = [f"This is the {i} sentence about a model that reads tokens in a file." for i in range(30)]


def write_texts(folder: Path, documents: list[str]) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "text-000000.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    record = FileRecord("text-000000.jsonl", "a" * 64, len(documents))
    return Manifest(Place(folder), "f", 64, "t", {}, (), (), 1, {}, texts=(record,))


@pytest.fixture
def config(tiny_base_folder: Path) -> PretrainConfig:
    return PretrainConfig(
        base=str(tiny_base_folder), method=MethodConfig(heads=1, ffn_units=8), train=TrainConfig(seq_length=64)
    )


def build(config: PretrainConfig, method: MethodConfig | None = None) -> torch.nn.Module:
    base = load_base(config.base)
    return ModelSpec(base, method or config.method).build()


@pytest.fixture
def run_dir(config: PretrainConfig, tmp_path: Path) -> Path:
    """A run whose bias of the word that every sentence has was trained up."""
    model = build(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.5 * torch.randn(param.shape, generator=generator))
    make_run(tmp_path / "run", config, model, load_base(config.base))
    shutil.copytree(config.base, tmp_path / "run" / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "run"


def test_sentences_are_drawn_by_their_text_alone(tiny_base_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_base_folder)
    chosen = choose_sentences(write_texts(tmp_path / "a", SENTENCES), [tokenizer], max_length=64)
    again = choose_sentences(write_texts(tmp_path / "b", SENTENCES[::-1]), [tokenizer], max_length=64)
    assert chosen == again and len(chosen) == NUM_EXAMPLES
    assert {sentence.left + sentence.word + sentence.right for sentence in chosen} <= set(SENTENCES)
    for masked in chosen:
        (asked,) = masked.questions
        assert asked.ids[asked.place] == tokenizer.mask_token_id and asked.ids.count(tokenizer.mask_token_id) == 1
        assert tokenizer.decode([asked.answer]).strip() == masked.word.lower() and len(masked.word) >= 4
    assert len({sentence.word for sentence in chosen}) > 1, "the word is drawn, too"


def test_what_cannot_be_masked_is_left_out(tiny_base_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_base_folder)
    texts = ["Too short.", "1 2 3 4 5 6 7 8 9 10 11.", "☃ ☃ ☃ ☃ ☃ ☃ ☃ ☃", SENTENCES[0], SENTENCES[0]]
    manifest = write_texts(tmp_path / "a", texts)
    assert len(choose_sentences(manifest, [tokenizer], max_length=64)) == 1, "equal sentences count once"
    assert choose_sentences(manifest, [tokenizer], max_length=6) == []


def test_before_is_the_base_and_after_is_the_run(run_dir: Path, config: PretrainConfig, tmp_path: Path) -> None:
    examples = make_examples(Place(run_dir), write_texts(tmp_path / "corpus", SENTENCES))
    assert len(examples) == NUM_EXAMPLES
    assert all([*made.answers] == ["before", "after"] for made in examples)
    assert any(made.answers["before"] != made.answers["after"] for made in examples)
    plain = build(config, MethodConfig(trains="all", heads=0, ffn_units=0))
    tokenizer = load_tokenizer(Path(config.base))
    expected = predict(plain, tokenizer, [made.masked.questions[0] for made in examples])
    for example, guesses in zip(examples, expected, strict=True):
        check_guesses(example.answers["before"], guesses)
        first, second, third, *own = example.answers["after"]
        assert first.share >= second.share >= third.share > 0 and [guess.is_right for guess in own] == [True] * len(own)


def check_guesses(found: Sequence[Guess], expected: Sequence[Guess]) -> None:
    assert [guess.word for guess in found] == [guess.word for guess in expected]
    assert [guess.share for guess in found] == pytest.approx([guess.share for guess in expected], abs=1e-6)


def test_with_new_words_the_base_and_the_untrained_model_are_asked(config: PretrainConfig, tmp_path: Path) -> None:
    """For a word that is one token of both vocabularies."""
    base = load_base(config.base)
    (tmp_path / "words.txt").write_text("tokenhood\n")
    known = read_base_vocabulary(config.base, base.tokenizer, base.config.vocab_size)
    made = import_words(VocabConfig(words=str(tmp_path / "words.txt")), known, tmp_path / "run" / "tokenizer")
    extended = replace(config, method=replace(config.method, trains="extensions"))
    make_run(tmp_path / "run", extended, ModelSpec.of(extended, base).with_tokenizer(made.folder).build(), base)
    texts = [text.replace("tokens", "tokenhood") for text in SENTENCES]
    examples = make_examples(Place(tmp_path / "run"), write_texts(tmp_path / "corpus", texts))
    asked = [example.masked.questions[1] for example in examples]
    expected = predict(build_base(base, torch.device("cpu")), load_tokenizer(base.folder), asked)
    assert len(examples) == NUM_EXAMPLES
    for example, guesses in zip(examples, expected, strict=True):
        assert [*example.answers] == ["before", "untrained", "after"] and example.masked.word != "tokenhood"
        check_guesses(example.answers["before"], guesses)
        assert example.answers["untrained"] == example.answers["after"] != guesses, "nothing was trained here"
        assert len(example.masked.questions[0].ids) < len(example.masked.questions[1].ids)


def test_a_router_has_a_column_of_its_own(run_dir: Path, config: PretrainConfig, tmp_path: Path) -> None:
    """One that leaves every row to the base answers as the base does."""
    table = torch.zeros(load_base(config.base).config.vocab_size + ROUTER_PAIRS, dtype=torch.int32)
    save_routers(Place(run_dir), {config.method.adapter: (table, RouterRecord(math.inf, 1.0, 0.0))})
    examples = make_examples(Place(run_dir), write_texts(tmp_path / "corpus", SENTENCES))
    for example in examples:
        assert [*example.answers] == ["before", "after", "with its router"]
        check_guesses(example.answers["with its router"], example.answers["before"])
    assert any(example.answers["after"] != example.answers["before"] for example in examples)


def test_the_right_word_is_known(config: PretrainConfig, tmp_path: Path) -> None:
    model = build(config)
    tokenizer = load_tokenizer(Path(config.base))
    masked = choose_sentences(write_texts(tmp_path / "a", SENTENCES), [tokenizer], max_length=64)[0]
    (asked,) = masked.questions
    for answer, place in ((predict(model, tokenizer, [asked])[0][0].word, 0), ("sun", NUM_GUESSES)):
        (found,) = predict(model, tokenizer, [replace(asked, answer=tokenizer.convert_tokens_to_ids(answer))])
        assert [i for i, guess in enumerate(found) if guess.is_right] == [place] and found[place].word == answer
        assert len(found) == max(NUM_GUESSES, place + 1), "the right word has its probability, likely or not"


def test_a_start_that_has_gone_or_trained_on_is_left_out(run_dir: Path, config: PretrainConfig, tmp_path: Path) -> None:
    manifest = write_texts(tmp_path / "corpus", SENTENCES)
    start = tmp_path / "start"
    shutil.copytree(run_dir, start)
    found = find_latest(Place(start / "checkpoints"))
    assert found is not None
    (run_dir / "config.yaml").write_text(dump_yaml(replace(config, init_from=str(start))))
    write_run(Place(run_dir), identity={"init_sha256": found.tensors_sha256})
    same = make_examples(Place(run_dir), manifest)
    assert all(len({*made.answers.values()}) == 1 for made in same), "the start's tensors are the run's here"
    write_run(Place(run_dir), identity={"init_sha256": "0" * 64})
    for made in make_examples(Place(run_dir), manifest):
        assert made.answers["before"] == () and made.answers["after"]
    shutil.rmtree(start)
    for made in make_examples(Place(run_dir), manifest):
        assert made.answers["before"] == () and made.answers["after"]


def test_a_model_that_reads_from_left_to_right_has_no_masks(
    run_dir: Path, config: PretrainConfig, tmp_path: Path
) -> None:
    changed = replace(config, objective=ObjectiveConfig(kind="causal"))
    (run_dir / "config.yaml").write_text(dump_yaml(changed))
    assert make_examples(Place(run_dir), write_texts(tmp_path / "corpus", SENTENCES)) == []
