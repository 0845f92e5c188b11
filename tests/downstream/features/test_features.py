"""Stored features against the encoder itself, their cache, the BiLSTM's masking, and a training on features."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS

from domext_ray.config.finetune import (
    FULL,
    FeaturesConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    GridConfig,
    LabelledConfig,
    TrainingScaleConfig,
)
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.downstream.features import features
from domext_ray.downstream.features.features import (
    collect_segments,
    cut_parts,
    hash_features,
    prepare_features,
)
from domext_ray.downstream.features.model import FeatureEncoder, build_feature_model
from domext_ray.downstream.features.store import FeatureStore, read_index, split_row
from domext_ray.downstream.finetune.finetune import gather_scores, run_finetuning
from domext_ray.downstream.finetune.training import Point, fit_task, restore_task
from domext_ray.downstream.finetune.trainings import FinetuneWork, score_point, train_point
from domext_ray.downstream.start.model import StartModel, build_task_model, load_start_model
from domext_ray.downstream.tasks.choices import ChoiceTask
from domext_ray.downstream.tasks.families import SingleTask
from domext_ray.downstream.tasks.task import Task, TaskOptions
from domext_ray.downstream.tasks.tokens import TokenClassificationTask
from domext_ray.errors import ConfigError, RunError
from domext_ray.labelled.examples import Choice, LabelledSet, TaggedSentence
from domext_ray.training.engine import join_alone

CPU = torch.device("cpu")
CONFIG = FinetuneConfig(
    engine=EngineConfig(precision="fp32"),
    features=FeaturesConfig(layers="1-2", hidden_size=64),
    labelled=LabelledConfig(max_length=32, stride=8),
    scale=TrainingScaleConfig(parallel=1, use_gpu=False),
)
ANIMALS = ("cat", "dog", "bird", "horse")


def make_sentences(split: str, num_sentences: int, seed: int) -> tuple[TaggedSentence, ...]:
    """Sentences in which animals are entities, and the word before them decides of which type."""
    generator = np.random.default_rng(seed)
    sentences = []
    for i in range(num_sentences):
        words = [str(each) for each in generator.choice(WORDS[:60], int(generator.integers(3, 7)))]
        tags = ["O"] * len(words)
        place = int(generator.integers(1, len(words)))
        is_small = bool(generator.integers(2))
        words[place - 1], words[place] = "small" if is_small else "good", str(generator.choice(ANIMALS))
        tags[place] = "B-Small" if is_small else "B-Good"
        sentences.append(TaggedSentence(f"{split}{i}", f"{split}:{i}", tuple(words), tuple(tags)))
    return tuple(sentences)


def make_choices(split: str, num_choices: int, seed: int) -> tuple[Choice, ...]:
    """Beginnings with three continuations of unequal lengths."""
    generator = np.random.default_rng(seed)

    def draw(low: int, high: int) -> str:
        return " ".join(generator.choice(WORDS, int(generator.integers(low, high))))

    return tuple(
        Choice(f"{split}{i}", f"{split}:{i}", draw(2, 6), "", tuple(draw(1, 8) for _ in range(3)), i % 3)
        for i in range(num_choices)
    )


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return load_start_model(str(tiny_base_folder))


@pytest.fixture(scope="module")
def task(start: StartModel) -> TokenClassificationTask:
    splits = [
        make_sentences(split, size, seed) for seed, (split, size) in enumerate((("a", 160), ("b", 40), ("c", 40)))
    ]
    data = LabelledSet("made", splits[0], splits[1], splits[2], ("Good", "Small"))
    return TokenClassificationTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))


@pytest.fixture(scope="module")
def choice_task(start: StartModel) -> ChoiceTask:
    data = LabelledSet("made", make_choices("a", 8, 0), make_choices("b", 8, 1), ())
    return ChoiceTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def folder(
    start: StartModel, task: TokenClassificationTask, choice_task: ChoiceTask, cache: Path, local_ray: None
) -> Path:
    """Features of both tasks, in more than one part and batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "BATCH_TOKENS", 200)
        return prepare_features(start, [task, choice_task], CONFIG, cache)


@pytest.mark.parametrize("name", ["task", "choice_task"])
def test_features_are_the_encoders_outputs(
    name: str, request: pytest.FixtureRequest, start: StartModel, folder: Path
) -> None:
    task: Task = request.getfixturevalue(name)
    store = FeatureStore(folder)
    encoder = build_task_model(start, task, FULL, dropout=0.0, seed=0).eval().bert
    rows = [*task.encode(task.data.train, is_training=True), *task.encode(task.data.dev, is_training=False)]
    for first in range(0, len(rows), 16):
        chosen = rows[first : first + 16]
        batch = store.add(task.collate(chosen), chosen, pad_id=start.tokenizer.pad_token_id)
        inputs = {
            name: None if each is None else each.flatten(0, -2)
            for name, each in batch.inputs.items()
            if name != "features"
        }
        with torch.no_grad():
            states = encoder(**inputs, output_hidden_states=True).hidden_states
        expected = torch.stack(states[1:3], dim=2)
        if inputs["attention_mask"] is not None:
            expected = expected * inputs["attention_mask"][..., None, None]
        found, ids = batch.inputs["features"], batch.inputs["input_ids"]
        assert found is not None and ids is not None
        assert found.shape[:-2] == ids.shape
        torch.testing.assert_close(found.flatten(0, -4), expected, atol=1e-4, rtol=2**-10)
    assert len(list(folder.glob("*.npy"))) > 2


def test_choices_are_split_without_their_padding(choice_task: ChoiceTask) -> None:
    rows = choice_task.encode(choice_task.data.train, is_training=True)
    segments = [segment for row in rows for segment in split_row(row, pad_id=0)]
    assert len(segments) == 3 * len(rows)
    assert all((each.input_ids != 0).all() for each in segments)
    assert any(len(each.input_ids) < row.length for row in rows for each in split_row(row, pad_id=0))


def test_what_is_computed_is_found_again(
    start: StartModel, task: Task, choice_task: Task, cache: Path, folder: Path, local_ray: None
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    other = replace(
        CONFIG,
        seed=7,
        grid=GridConfig(lr="1e-4"),
        features=FeaturesConfig(layers="1-2", combine="mix", hidden_size=8, num_layers=1),
    )
    assert prepare_features(start, [task, choice_task], other, cache) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_half_written_folder_is_made_again(
    start: StartModel, task: Task, choice_task: Task, folder: Path, tmp_path: Path, local_ray: None
) -> None:
    broken = tmp_path / folder.name
    shutil.copytree(folder, broken)
    part = next(broken.glob("*.npy"))
    part.rename(tmp_path / "elsewhere")
    assert read_index(broken) is None
    part.write_bytes((tmp_path / "elsewhere").read_bytes()[:200])
    (broken / "index.json").unlink()
    assert prepare_features(start, [task, choice_task], CONFIG, tmp_path) == broken
    store, made_again = FeatureStore(folder), FeatureStore(broken)
    for segment in collect_segments([task, choice_task]):
        expected = store.read(segment).astype(np.float32)
        # Batches are others than in the fixture, so that the last bit may be another too.
        assert np.allclose(made_again.read(segment), expected, atol=1e-4, rtol=2**-9)
    assert not part.exists()


def test_a_full_disk_is_told_before_the_work(
    start: StartModel, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FREE_BYTES", 2**60)
    with pytest.raises(RunError, match=r"the features take .* GB and .* has .* GB left"):
        prepare_features(start, [task], CONFIG, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_encoder_layers_and_rows_decide_the_key(start: StartModel, task: Task, choice_task: Task) -> None:
    segments = collect_segments([task])
    keys = [
        hash_features(start, segments, (1, 2)),
        hash_features(start, segments, (0, 1, 2)),
        hash_features(start, segments[1:], (1, 2)),
        hash_features(start, collect_segments([task, choice_task]), (1, 2)),
        hash_features(replace(start, sha256="0"), segments, (1, 2)),
        hash_features(replace(start, config=_change(start, hidden_act="relu")), segments, (1, 2)),
    ]
    assert len(set(keys)) == len(keys)
    renamed = replace(start, id="elsewhere", config=_change(start, _name_or_path="elsewhere"))
    assert hash_features(renamed, list(segments), (1, 2)) == keys[0]
    swapped = segments[0].key, replace(segments[0], token_type_ids=segments[0].token_type_ids + 1).key
    assert swapped[0] != swapped[1]


def _change(start: StartModel, **values: Any) -> Any:
    config = type(start.config)(**start.config.to_dict())
    for name, value in values.items():
        setattr(config, name, value)
    return config


def test_parts_hold_every_segment_once_and_are_bounded(task: Task) -> None:
    segments = collect_segments([task])
    parts = cut_parts(segments, 50)
    assert [each.key for part in parts for each in part] == [each.key for each in segments]
    assert all(len(part) == 1 or sum(len(each.input_ids) for each in part) <= 50 for part in parts)
    assert len({each.key for each in segments}) == len(segments)


@pytest.mark.parametrize("combine", ["concat", "mix"])
def test_padding_changes_no_state(combine: str) -> None:
    torch.manual_seed(0)
    encoder = FeatureEncoder((3, 8), FeaturesConfig(layers="1-3", combine=combine, hidden_size=12), 0.0).eval()
    rows = [torch.randn(1, length, 3, 8) for length in (7, 4, 1)]
    padded = torch.full((3, 7, 3, 8), 100.0)  # what lies in padding must not matter, whatever it is
    mask = torch.zeros(3, 7, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : row.shape[1]], mask[i, : row.shape[1]] = row[0], 1
    together = encoder(features=padded, attention_mask=mask, pool=False).last_hidden_state
    assert together.shape == (3, 7, 12)
    for i, row in enumerate(rows):
        alone = encoder(None, features=row).last_hidden_state[0]
        torch.testing.assert_close(together[i, : row.shape[1]], alone)
    # Both directions read: the first token's state depends on the last token and the other way round.
    changed = rows[0].clone()
    changed[0, -1] += 1.0
    assert not torch.allclose(encoder(features=changed).last_hidden_state[0, 0], together[0, 0])
    changed = rows[0].clone()
    changed[0, 0] += 1.0
    assert not torch.allclose(encoder(features=changed).last_hidden_state[0, -1], together[0, 6])


def test_layers_are_concatenated_or_mixed() -> None:
    states = torch.randn(2, 5, 3, 8)
    concat = FeatureEncoder((3, 8), FeaturesConfig(layers="1-3", hidden_size=12), 0.0)
    assert concat.lstm.input_size == 24
    assert torch.equal(concat.combine(states)[1, 2], torch.cat(list(states[1, 2])))
    mix = FeatureEncoder((3, 8), FeaturesConfig(layers="1-3", combine="mix", hidden_size=12), 0.0)
    assert mix.lstm.input_size == 8
    torch.testing.assert_close(mix.combine(states), states.mean(dim=2))  # the weights start equal, with sum 1
    assert mix.mix is not None
    with torch.no_grad():
        mix.mix.weights.copy_(torch.tensor([0.0, 50.0, 0.0]))
        mix.mix.scale.fill_(2.0)
    torch.testing.assert_close(mix.combine(states), 2 * states[:, :, 1])


def test_the_model_is_a_bilstm_of_the_papers_size_and_a_head(start: StartModel, task: Task) -> None:
    config = replace(CONFIG, features=FeaturesConfig(layers="0-2"))
    model: Any = build_feature_model(start, task, config, seed=1)
    assert (model.bert.lstm.input_size, model.bert.lstm.hidden_size, model.bert.lstm.num_layers) == (96, 384, 2)
    assert model.classifier.in_features == 768
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"bert", "classifier"}
    assert all(name.startswith(("bert.lstm.", "classifier.")) for name, _ in model.named_parameters())
    again, other = (build_feature_model(start, task, config, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())
    assert not torch.equal(other["bert.lstm.weight_ih_l0"], again["bert.lstm.weight_ih_l0"])


@pytest.mark.parametrize("combine", ["concat", "mix"])
def test_it_learns_and_is_restored(
    start: StartModel, task: TokenClassificationTask, folder: Path, combine: str
) -> None:
    join_alone()
    store = FeatureStore(folder)
    config = replace(CONFIG, features=replace(CONFIG.features, combine=combine))
    point = Point(lr=1e-2, batch_size=8, epochs=6.0, seed=3)
    fitted = fit_task(start, task, config, point, CPU, lambda _: None, store)
    dev = task.data.dev
    assert fitted.dev_scores[-1] > 0.85 > 0.7 > task.score(dev, task.predict_majority(dev)).get(task.metric)
    assert fitted.tensors.keys() == {name for name, _ in fitted.model.named_parameters()}
    restored = restore_task(start, task, config, point, CPU, fitted.tensors, fitted.thresholds, store)
    assert restored.predict(task.data.test) == fitted.predict(task.data.test)


def test_choices_are_scored_from_features(start: StartModel, choice_task: ChoiceTask, folder: Path) -> None:
    join_alone()
    config = replace(CONFIG, engine=EngineConfig(precision="bf16"))
    point = Point(lr=1e-2, batch_size=4, epochs=12.0, seed=0)
    fitted = fit_task(start, choice_task, config, point, CPU, lambda _: None, FeatureStore(folder))
    train = choice_task.data.train
    assert choice_task.score(train, fitted.predict(train)).get("accuracy") > 0.8  # learnt by heart: majority is 3/8


def test_a_layer_that_is_not_there_is_named(start: StartModel, task: Task, tmp_path: Path) -> None:
    config = replace(CONFIG, features=FeaturesConfig(layers="2-3"))
    with pytest.raises(ConfigError, match=r"--features\.layers is '2-3'; .* has 2 layers, so layer 3 is none"):
        build_feature_model(start, task, config, seed=0)
    with pytest.raises(ConfigError, match=r"--features\.layers"):
        prepare_features(start, [task], config, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: {"method": replace(FULL, bottleneck_size=8, trains="extensions")},
            r"--method\.trains is 'extensions'",
        ),
        (lambda: {"method": MethodConfig(trains="layer_norms", heads=0, ffn_units=0)}, r"--method\.trains"),
        (lambda: {"optim": FinetuneOptimConfig(head_lr=1e-3)}, r"--optim\.head_lr is 0\.001; it must be 0\.0 with"),
        (lambda: {"optim": FinetuneOptimConfig(top_layers=1, top_layers_lr=1e-3)}, r"--optim\.top_layers is 1"),
        (lambda: {"engine": EngineConfig(activation_checkpointing=True)}, r"--engine\.activation_checkpointing"),
    ],
)
def test_what_needs_an_encoder_is_refused(change: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **change())


def test_a_point_is_trained_and_scored(
    start: StartModel, task: TokenClassificationTask, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "trainings").mkdir()
    config = replace(CONFIG, grid=GridConfig(lr="1e-2", batch_size="8", epochs="1"))
    work = FinetuneWork(config, start, SingleTask(task), tmp_path, 1.0, folder)
    point = Point(lr=1e-2, batch_size=8, epochs=1.0, seed=0)
    train_point(work, point)
    score_point(work, point, None)
    final = gather_scores(work, [point], point)
    assert final.restarts.keys() == {"dev", "test"}
    assert any(note.startswith("a model on features is not exported") for note in final.notes)
    assert not (tmp_path / "export").exists()


@pytest.mark.slow
def test_a_run_on_features(
    tiny_base_folder: Path, tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, size, seed in (("train", 60, 0), ("dev", 20, 1), ("test", 20, 2)):
        lines = [
            "\n".join(f"{word} {tag}" for word, tag in zip(each.words, each.tags, strict=True))
            for each in make_sentences(split, size, seed)
        ]
        (tmp_path / f"{split}.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    config = replace(
        CONFIG,
        task="ner",
        data=str(tmp_path),
        model=str(tiny_base_folder),
        grid=GridConfig(lr="1e-2", batch_size="8", epochs="3"),
        run=replace(CONFIG.run, dir=str(tmp_path / "runs"), name="features"),
    )
    run_finetuning(replace(config, dry_run=True))
    assert "parameters train" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    folder = run_finetuning(config)
    output = capsys.readouterr().out
    assert "a model on features is not exported" in output
    assert (folder / "summary.json").exists()
    assert not (folder / "export").exists()
    assert len(list((tmp_path / "runs" / ".features").glob("*/index.json"))) == 1
