"""New words that start where the base's pieces of them lead."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import WORDS
from small_runs import attempts, hold, make_config, make_train
from torch import Tensor, nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import (
    ObjectiveConfig,
    PretrainConfig,
    ScaleConfig,
    VocabConfig,
)
from domext_ray.corpus import snippets
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.snippets import SnippetRequest, find_snippets, get_or_find_snippets, read_snippets
from domext_ray.errors import CorpusError, OptionError
from domext_ray.inputs import prepare_run
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.plan import resolve
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.distillation import choose_snippets, distill_new_words, fit_biases
from domext_ray.training.metrics import read_metrics
from domext_ray.training.pretrain import pretrain
from domext_ray.training.run import Run
from domext_ray.training.start import NEW_WORD_TENSORS
from domext_ray.training.worker import PretrainWorker
from domext_ray.vocabulary.tokenizer import load_tokenizer

CPU = torch.device("cpu")
COMMON, RARE, ABSENT = ["morningbook", "greenhouse", "dogs", "##ly"], "paperbird", "zebra"
NEW_WORDS = [*COMMON, RARE, ABSENT]
NUM_RARE = 3


@dataclass(frozen=True)
class Prepared:
    """A run and its base."""

    run: Run
    base: Base

    @property
    def config(self) -> PretrainConfig:
        return self.run.config

    @property
    def tokenizer_dir(self) -> Path:
        return self.run.inputs.tokenizer.local()

    @property
    def manifest(self) -> Manifest:
        return self.run.inputs.domain

    @property
    def first_id(self) -> int:
        """Id of the first new word."""
        return self.base.config.vocab_size

    def build(self, word_init: Any = "distill", **method: Any) -> DomextForMaskedLM:
        """The run's model at its start."""
        values = {**vars(self.config.method), **method, "word_init": word_init}
        config = replace(self.config, method=MethodConfig(**values))
        return ModelSpec.of(config, self.base).with_tokenizer(self.tokenizer_dir).build()

    def distill(self, model: DomextForMaskedLM, seed: int = 0, tell: Any = lambda text: None) -> dict[str, Tensor]:
        """Fit a model's new words; return all of its tensors."""
        choose_snippets(self.run.inputs, seed)
        tokenizers = load_tokenizer(self.tokenizer_dir), load_tokenizer(self.base.folder)
        distill_new_words(model, self.manifest, *tokenizers, ObjectiveConfig(), seed=seed, device=CPU, tell=tell)
        return copy_tensors(model)


def copy_tensors(model: DomextForMaskedLM) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in cast(nn.Module, model).state_dict().items()}


@pytest.fixture(scope="module")
def prepared(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Prepared:
    return prepare(tiny_base_folder, NEW_WORDS, tmp_path_factory.mktemp("distillation"))


def prepare(base_folder: Path, new_words: list[str], folder: Path) -> Prepared:
    """Make a corpus and the inputs of a run on it."""
    random, lines = np.random.default_rng(0), []
    for number in range(400):
        words = [*random.choice(WORDS, 12), *random.choice(COMMON[:3], 2), f"{random.choice(WORDS)}ly"]
        random.shuffle(words)
        lines.append(" ".join([*words, *[RARE] * (number < NUM_RARE)]) + ".\n")
    (folder / "corpus.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "words.txt").write_text("\n".join(new_words) + "\n", encoding="utf-8")
    config = make_config(
        base_folder,
        folder / "corpus.txt",
        vocab=VocabConfig(words=str(folder / "words.txt")),
        method=MethodConfig(name="words", heads=0, ffn_units=8, word_init="distill"),
        train=make_train(6, save_every=3),
    )
    return Prepared(prepare_run(resolve(config)), load_base(config.base))


@torch.no_grad()
def measure_distance(prepared: Prepared, model: DomextForMaskedLM, *words: str) -> float:
    """Mean squared difference of the new words' states from the mean of their pieces', after the first layer of two."""
    tokenizer, base_tokenizer = load_tokenizer(prepared.tokenizer_dir), load_tokenizer(prepared.base.folder)
    cast(nn.Module, model).eval()
    total = 0.0
    for word in (*COMMON[:3], *words):
        states = []
        for each in (tokenizer, base_tokenizer):
            before, after = each.encode("the man read a")[:-1], each.encode("in the old garden.")[1:]
            inside = each.encode(f" {word}", add_special_tokens=False)
            ids = torch.tensor([[*before, *inside, *after]])
            found = model.bert(ids, output_hidden_states=True, pool=False).hidden_states[1][0]
            states.append(found[len(before) : -len(after)].mean(0))
        total += float((states[0] - states[1]).square().mean())
    return total


def test_fitted_words_act_as_their_pieces_do(prepared: Prepared) -> None:
    """In a sentence that is in no snippet."""
    model = prepared.build()
    mean = measure_distance(prepared, model, "cityly")
    prepared.distill(model)
    assert measure_distance(prepared, model, "cityly") < 0.9 * mean


def test_words_beside_byte_level_bpe_act_as_their_pieces_do(
    tiny_roberta_folder: Path, tmp_path: Path, local_ray: None
) -> None:
    own = prepare(tiny_roberta_folder, [*COMMON[:3], RARE, ABSENT, "##dogs"], tmp_path)
    tokenizer, base_tokenizer = load_tokenizer(own.tokenizer_dir), load_tokenizer(tiny_roberta_folder)
    assert len(tokenizer.tokenize(" greenhouse")) == 1 < len(base_tokenizer.tokenize(" greenhouse"))
    told: list[str] = []
    model, start = own.build(), copy_tensors(own.build("subword_mean"))
    pieces = base_tokenizer.encode(" greenhouse", add_special_tokens=False)
    known, new = (start[f"bert.embeddings.{name}.weight"] for name in ("word_embeddings", "extension"))
    torch.testing.assert_close(new[1], known[pieces].mean(0))
    mean = measure_distance(own, model)
    fitted = own.distill(model, tell=told.append)
    assert measure_distance(own, model) < 0.9 * mean
    assert told[-1].endswith("2 that no row has start from the mean of their pieces") or "; " in told[-1]
    assert torch.equal(fitted[NEW_WORD_TENSORS[0]][-2], new[-2]), "a word that is nowhere keeps its start"


def test_only_the_new_words_change_and_a_seed_decides(prepared: Prepared) -> None:
    start, model = copy_tensors(prepared.build()), prepared.build(module_hidden_size=8, module_ffn_size=8)
    state = torch.get_rng_state()
    first = prepared.distill(model)
    assert torch.equal(torch.get_rng_state(), state) and cast(nn.Module, model).training
    assert all(layer.extension is not None for layer in model.bert.encoder.layer)
    again, other = prepared.distill(prepared.build()), prepared.distill(prepared.build(), seed=1)
    tied = {*NEW_WORD_TENSORS, "cls.predictions.extension.weight"}
    assert {name for name, each in again.items() if not torch.equal(each, start[name])} == tied
    for name in NEW_WORD_TENSORS:
        assert torch.equal(first[name], again[name]), "modules take no part"
        assert not torch.equal(first[name], other[name])


def test_a_word_without_a_snippet_keeps_the_mean_of_its_pieces(prepared: Prepared) -> None:
    told: list[str] = []
    mean, fitted = copy_tensors(prepared.build("subword_mean")), prepared.distill(prepared.build(), tell=told.append)
    rows = zip(mean[NEW_WORD_TENSORS[0]], fitted[NEW_WORD_TENSORS[0]], strict=True)
    assert [torch.equal(*each) for each in rows] == [word == ABSENT for word in NEW_WORDS]
    assert told[0].startswith("new words: fitting 5 to the base on ")
    assert told[-1].endswith("; 1 that no row has start from the mean of their pieces")


def test_snippets_are_around_each_word_as_often_as_asked_for(prepared: Prepared) -> None:
    tokenizer = load_tokenizer(prepared.tokenizer_dir)
    inside = np.array([each.startswith("##") for each in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))])
    request = SnippetRequest(prepared.manifest, inside, prepared.first_id, per_word=5, length=8, seed=0)
    found = find_snippets(request)
    joined = np.concatenate(found.ids)
    counts = np.bincount(joined, minlength=len(tokenizer))[prepared.first_id :]
    assert counts[-1] == found.counts[-1] == 0
    assert counts[-2] == found.counts[-2] <= NUM_RARE
    assert (counts[:-2] >= 5).all() and (counts <= found.counts).all() and len(found.ids) < 25
    assert max(map(len, found.ids)) == 8 and not any(inside[each[0]] for each in found.ids)
    assert not {tokenizer.cls_token_id, tokenizer.sep_token_id} & set(joined.tolist())
    other = find_snippets(replace(request, seed=1))
    assert [each.tolist() for each in other.ids] != [each.tolist() for each in found.ids]


def test_stored_snippets_are_those_that_are_found_and_are_found_once(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(prepared.tokenizer_dir)
    inside = np.array([each.startswith("##") for each in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))])
    request = SnippetRequest(prepared.manifest, inside, prepared.first_id, per_word=100, length=24, seed=7)
    with pytest.raises(CorpusError, match=r"snippets-\w+.npz is missing or damaged; delete it"):
        read_snippets(request)
    get_or_find_snippets(request)
    monkeypatch.setattr(snippets, "read_train_batches", None)  # nobody scans the corpus again
    get_or_find_snippets(request)
    stored = read_snippets(request)
    monkeypatch.undo()
    found = find_snippets(request)
    assert [each.tolist() for each in stored.ids] == [each.tolist() for each in found.ids]
    assert stored.counts.tolist() == found.counts.tolist() and stored.num_tokens == found.num_tokens
    request.place.put(request.place.read_bytes()[:-100])
    with pytest.raises(CorpusError, match="is missing or damaged"):
        read_snippets(request)
    first = find_snippets(replace(request, seed=0))
    digest = hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in [*first.ids, first.counts]))
    assert (len(first.ids), first.num_tokens, digest.hexdigest()[:16]) == (168, 7449, "fa6a117fb8b1ff60")


@pytest.mark.jobs
def test_ranks_read_what_the_driver_stored(prepared: Prepared, tmp_path: Path) -> None:
    """One rank and two, whose words stay as they were fitted: they are the same, bit for bit."""
    method = replace(prepared.config.method, trains="adapter")
    train = replace(prepared.config.train, max_steps=1, save_every=1)
    found = []
    for number in (1, 2):
        scale = ScaleConfig(num_workers=number, cpus_per_worker=0.25, use_gpu=False)
        folder = tmp_path / str(number)
        folder.mkdir()
        config = replace(prepared.config, method=method, train=train, scale=scale)
        pretrain(replace(hold(prepared.run, folder), config=config))
        latest = find_latest(Place(folder / "checkpoints"))
        assert latest is not None
        found.append(latest.fixed)
    fitted = prepared.distill(prepared.build())
    for name in NEW_WORD_TENSORS:
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], fitted[name])


def test_biases_let_each_word_be_predicted_as_often_as_it_occurs(prepared: Prepared) -> None:
    model, draw = prepared.build(), torch.Generator().manual_seed(0)
    states = torch.randn(200, prepared.base.config.hidden_size, generator=draw)
    frequencies = torch.tensor([0.05, 0.02, 0.01, 0.001, 1e-5, 1e-7])
    with torch.no_grad():
        head = model.cls.predictions
        fit_biases(model, states, head.decoder(states, []).logsumexp(-1), frequencies)
        scores = torch.cat([head.decoder(states, []), head.extension(states)], dim=-1)
        predicted = scores.softmax(-1).mean(0)[prepared.first_id :]
    torch.testing.assert_close(predicted, frequencies, rtol=1e-3, atol=0.0)


@pytest.fixture
def start(prepared: Prepared, tmp_path: Path) -> Iterator[Callable[..., PretrainWorker]]:
    """Gives the worker of a new attempt in a run's directory below the test's."""
    with attempts() as begin:

        def begin_named(name: str, **parts: Any) -> PretrainWorker:
            choose_snippets(prepared.run.inputs, prepared.config.seed)
            return begin(prepared.run, tmp_path / name, **parts)

        yield begin_named


def test_a_run_starts_from_the_fitted_words_and_resumes_exactly(
    start: Callable[..., PretrainWorker], prepared: Prepared, tmp_path: Path
) -> None:
    worker = start("whole")
    fitted, found = prepared.distill(prepared.build()), worker.engine.gather_state()
    assert all(torch.equal(found.tensors[name].param, fitted[name]) for name in NEW_WORD_TENSORS)
    worker.run()
    start("stopped").run(3)
    start("stopped").run()
    losses = [
        [each.get("train/mlm_loss") for each in read_metrics(Place(tmp_path / name / "metrics.jsonl"))]
        for name in ("whole", "stopped")
    ]
    assert len(losses[0]) == 7 and losses[0] == losses[1]
    notes = (tmp_path / "stopped" / "events.jsonl").read_text(encoding="utf-8")
    assert notes.count("new words: fitted in") == 1, "words that have trained are not fitted again"


def test_words_that_do_not_train_are_carried_by_checkpoints(
    start: Callable[..., PretrainWorker], prepared: Prepared, tmp_path: Path
) -> None:
    method = replace(prepared.config.method, trains="adapter")
    start("domain", method=method).run(3)
    latest = find_latest(Place(tmp_path / "domain" / "checkpoints"))
    assert latest is not None
    fixed = latest.fixed
    fitted = prepared.distill(prepared.build())
    assert all(torch.equal(fixed[name], fitted[name]) for name in NEW_WORD_TENSORS)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "method.word_init is 'distill'; it must be random without new words beside a base"),
        ({"base": "none", "vocab": VocabConfig(size=100)}, "random without new words beside a base"),
        (
            {"vocab": VocabConfig(size=100), "objective": ObjectiveConfig(kind="causal")},
            "random or subword_mean with causal",
        ),
    ],
)
def test_words_are_fitted_where_there_are_words_and_a_base(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        PretrainConfig(method=MethodConfig(word_init="distill", trains="all"), **values)
