"""Every preset is read by its job, and what trains says its plan; a preset is found by its name."""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from given_options import parse_config

from domext_ray.commands.pretraining import METHODS
from domext_ray.config.finetune import AblateConfig, FinetuneConfig
from domext_ray.config.jobs import StudyConfig
from domext_ray.config.options.build import describe_difference, dump_yaml, identity_of, to_dict
from domext_ray.config.presets import FOLDER, describe_preset, find_preset, list_presets
from domext_ray.config.pretrain import ObjectiveConfig, PretrainConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import RunError
from domext_ray.pretraining.inputs import run_vocabulary
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.runs.run_directory import check_identity, write_run
from domext_ray.storage import Place
from domext_ray.studies.sweep.plan import choose_points
from domext_ray.studies.sweep.space import read_space

OTHER_JOBS: dict[str, tuple[type[Any], list[str]]] = {
    "ablate": (AblateConfig, ["--study", "size"]),
    "compare": (StudyConfig, ["--tokens", "1000"]),
    "compare_base": (StudyConfig, ["--tokens", "1000"]),
    "finetune": (FinetuneConfig, []),
    "vocab": (PretrainConfig, ["--vocab.size", "50"]),
}
"""What is no training job's: its configuration, and what its user must give."""
SWEEPS = sorted((FOLDER / "sweeps").glob("*.yaml"))
PRETRAINING = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.stem not in OTHER_JOBS and path not in SWEEPS]
DRY_RUN = ("af_words", "exbert", "bert")
"""What all others do, too: new words, modules beside a base, and none of them."""
BASE_SIZE = [path for path in PRETRAINING if path.stem.endswith("_base")]
MIXES = {path.stem.removeprefix("masks_"): path for path in PRETRAINING if path.stem.startswith("masks_")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    path, draw = tmp_path_factory.mktemp("corpus") / "corpus.txt", random.Random(0)
    words = ["".join(draw.choices("aeiorstn", k=5)) for _ in range(500)]
    lines = (f"{' '.join(draw.choices(words, k=6))}. {' '.join(draw.choices(words, k=6))}" for _ in range(4_000))
    path.write_text("".join(f"{line}.\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def options(corpus: Path, tmp_path: Path) -> list[str]:
    """Of a dry run on the corpus; its folder of runs must stay empty."""
    places = ["--corpus", str(corpus), "--run.dir", str(tmp_path / "runs")]
    return [*places, "--train.tokens_per_second", "1000", "--dry_run", "true"]


def read_preset(path: Path, *options: str) -> PretrainConfig:
    own = ["--base", "general-mini"] if path.stem.endswith("_base") else []  # no other one is on every machine
    return parse_config(PretrainConfig, "", ["--config", str(path), *options, *own])


def test_a_training_jobs_file_and_a_sweeps_are_read() -> None:
    for path in PRETRAINING:
        assert read_preset(path).train, path
    for path in SWEEPS:
        config = parse_config(SweepConfig, "", ["--config", str(path)])
        assert config.run.name == path.stem.replace("_", "-") and read_space(config.space).list_preparations()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=() if path.parent == FOLDER and path.stem in DRY_RUN else pytest.mark.slow, id=path.stem
        )
        for path in PRETRAINING
    ],
)
def test_a_training_jobs_file_dry_runs(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = run_pretraining(read_preset(path, *options))
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("fits: ") or "warning: " in printed.splitlines()[0]
    assert "dry run: nothing was started" in printed and "trainable" in printed and "at 1,000 tokens/s" in printed
    assert not run.exists() and not run.parent.exists()


def test_files_of_a_folder_name_different_runs() -> None:
    for folder in {path.parent for path in PRETRAINING}:
        runs = [yaml.safe_load(path.read_text()).get("run", {}).get("name") for path in sorted(folder.glob("*.yaml"))]
        named = [name for name in runs if name and name != "general-mini"]  # two phases of one run
        assert len(named) == len(set(named))


def test_another_jobs_file_is_read(options: list[str]) -> None:
    for name, (config_class, given) in OTHER_JOBS.items():
        assert isinstance(parse_config(config_class, name, given), config_class)
    assert run_vocabulary(parse_config(PretrainConfig, "vocab", [*OTHER_JOBS["vocab"][1], *options])) is None


def test_masking_mixes_are_those_of_their_names() -> None:
    """MASK, SAME and RND of BERT's table 8, in per cent."""
    assert MIXES.keys() == {"80_10_10", "100_0_0", "80_0_20", "80_20_0", "0_20_80", "0_0_100"}
    for name, path in MIXES.items():
        objective = parse_config(PretrainConfig, "", ["--config", str(path)]).objective
        masked, replaced = objective.mask_token_frac, objective.random_token_frac
        shares = [masked, 1 - masked - replaced, replaced]
        assert [round(100 * share) for share in shares] == [int(number) for number in name.split("_")]


def test_ablations_of_one_table_differ_in_one_thing() -> None:
    folder = FOLDER / "ablations"

    def read(pattern: str, *left_out: str) -> list[dict[str, Any]]:
        found = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob(pattern))]
        return [{name: value for name, value in preset.items() if name not in (*left_out, "run")} for preset in found]

    tasks = [read(f"{name}.yaml", "objective")[0] for name in ("next_sentence", "no_next_sentence", "causal")]
    for table in (read("masks_*.yaml", "objective"), read("size_*.yaml", "shape"), tasks):
        assert len(table) >= 3 and all(preset == table[0] for preset in table)
    left_to_right = parse_config(PretrainConfig, "", ["--config", str(folder / "causal.yaml")])
    assert left_to_right.objective == ObjectiveConfig(kind="causal")


def test_presets_at_base_size_differ_in_method_words_and_rate_only() -> None:
    configs = {path.stem: parse_config(PretrainConfig, path.stem) for path in BASE_SIZE}
    assert len(configs) == 6 and all(preset.optim.lr_width == 768 for preset in configs.values())
    plain, shared = PretrainConfig(), {}
    for name, config in configs.items():
        if name == "af_routed_base":  # what it keeps to on general text is part of the method
            keep, weight = plain.objective.keep, plain.objective.keep_weight
            objective = replace(config.objective, keep=keep, keep_weight=weight)
            config = replace(config, objective=objective, replay=plain.replay)
        optim = replace(config.optim, lr=plain.optim.lr)
        shared[name] = replace(config, method=plain.method, vocab=plain.vocab, optim=optim)
    for name, config in shared.items():
        assert not describe_difference(to_dict(shared["bert_base"]), to_dict(config)), name


@pytest.mark.parametrize("path", BASE_SIZE, ids=lambda path: path.stem)
def test_a_preset_at_base_size_says_where_its_rate_and_its_papers_setting_are(path: Path) -> None:
    lines = [line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    comment = " ".join(lines)
    assert "The rate is" in comment and "not tuned here" in comment and re.search(r"et al\. \(?20\d\d", comment)
    if path.stem != "af_routed_base":  # which no paper has
        setting = re.search(r"The paper's own setting: (--.*?)\. domext", comment)
        assert setting is not None
        shared, own = (parse_config(PretrainConfig, path.stem, flags) for flags in ([], shlex.split(setting[1])))
        assert own != shared and own.optim.lr == shared.optim.lr
        assert (shared.train.attention_dropout_prob, own.train.attention_dropout_prob) == (0.0, 0.1)


@pytest.mark.parametrize("path", BASE_SIZE, ids=lambda path: path.stem)
def test_a_run_of_a_preset_of_0_1_0_is_told_which_option_finishes_it(path: Path, tmp_path: Path) -> None:
    """Its attention had as much dropout as its hidden states, as the papers' has."""
    former = ["--train.attention_dropout", "same"]
    write_run(Place(tmp_path), identity=identity_of(read_preset(path, *former)))
    with pytest.raises(RunError, match=r"\(--train\.attention_dropout was same and is 0 now\); .* the options that"):
        check_identity(Place(tmp_path), identity_of(read_preset(path)))
    check_identity(Place(tmp_path), identity_of(read_preset(path, *former)))


def test_a_presets_rate_beside_a_base_of_another_size_is_a_warning(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--base", "general-mini"]
    warning = (
        "warning: the preset has rates for bases of width 768, and 'general-mini' has 256; give --optim.lr, or a "
        "preset for bases of that width (domext presets lists them).\n"
    )
    for preset, flags, is_warned in (
        ("bottleneck_base", [], True),
        ("bottleneck_base", ["--optim.lr", "1e-3"], False),
        ("bottleneck", [], False),
    ):
        run_pretraining(parse_config(PretrainConfig, preset, [*options, *own, *flags]))
        assert (warning in capsys.readouterr().out) == is_warned, (preset, flags)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == "af_mini" else pytest.mark.slow, id=path.stem) for path in SWEEPS],
)
def test_a_sweeps_space_makes_trials(path: Path) -> None:
    config = parse_config(SweepConfig, "", ["--config", str(path)])
    space = read_space(config.space)
    if config.base == "general-mini":  # no other one is on every machine
        points, reasons = choose_points(config, space)
        expected = {"grid": 20 if "exbert" in path.stem else 10, "random": config.search.trials}
        assert len(points) == expected.get(config.search.searcher, 0)
        assert all("there is no extension" in reason for reason in reasons), "AF without heads and units is none"


def test_a_file_changes_a_preset_option_by_option_and_flags_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "only_corpus.yaml"
    path.write_text("corpus: notes.txt\noptim: {lr: 3e-4}\ntrain: {max_steps: 1e3}\n", encoding="utf-8")
    flags = ["--config", str(path), "--train.max_steps", "7"]
    found = parse_config(PretrainConfig, "exbert", flags)
    plain = parse_config(PretrainConfig, "exbert", [])
    assert sorted(describe_difference(to_dict(plain), to_dict(found))) == [
        "corpus: 'package-docs' -> 'notes.txt'",
        "optim.lr: 0.0005 -> 0.0003",
        "optim.lr_width: 256 -> 0",
        "train.max_steps: 450 -> 7",
    ]


def test_a_sweeps_file_replaces_space_search_and_budget_whole(tmp_path: Path) -> None:
    path, preset = tmp_path / "sweep.yaml", "sweeps/af_mini"
    space = "{method.layers: {choice: ['0-1', '2-3']}}"
    path.write_text(f"space: {space}\nsearch: {{searcher: grid}}\nbudget: {{seconds: 9}}\n", encoding="utf-8")
    found = parse_config(SweepConfig, preset, ["--config", str(path)])
    assert list(found.space) == ["method.layers"]
    assert (found.search.scheduler, found.search.rungs, found.budget.steps, found.budget.seconds) == ("none", 1, 0, 9)
    assert found.method.ffn_units == 400 and found.train.global_batch_size == 16, "the rest stands on the preset"
    flagged = parse_config(SweepConfig, preset, ["--budget.tokens", "5e6", "--search.trials", "3"])
    assert (flagged.budget.steps, flagged.budget.tokens) == (0, 5_000_000)
    assert (flagged.search.scheduler, flagged.search.trials) == ("asha", 3), "a flag changes one option of a search"


def test_presets_of_a_study_are_added_to_those_that_ship(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("presets: {mine: {method: {heads: 2}}, af: {optim: {lr: 1e-4}}}\n", encoding="utf-8")
    flags = ["--config", str(path), "--tokens", "9", "--presets", "{mine: {method: {ffn_units: 0}}}"]
    found = parse_config(StudyConfig, "compare", flags).presets
    assert found["mine"] == {"method": {"heads": 2, "ffn_units": 0}}
    assert found["af"]["method"] == {"heads": 1, "ffn_units": 512} and {"full", "lora", "exbert"} <= found.keys()


def test_a_complete_file_is_itself_on_every_preset(tmp_path: Path) -> None:
    """A run's config.yaml and a sweep's best.yaml say every option."""
    flags = ["--base", "none", "--vocab.size", "99", "--optim.on_non_finite", "skip", "--method.name", "mine"]
    complete = parse_config(PretrainConfig, "bert", flags)
    (tmp_path / "config.yaml").write_text(dump_yaml(complete), encoding="utf-8")
    for job in METHODS:
        given = ["--config", str(tmp_path / "config.yaml")]
        assert parse_config(PretrainConfig, METHODS[job].preset, given) == complete


def test_a_preset_begins_with_a_sentence_about_itself() -> None:
    for name in list_presets():
        text, sentence = find_preset(name).read_text(encoding="utf-8"), describe_preset(name)
        assert text.startswith(f"# {sentence}\n") and sentence.endswith(".") and 12 <= len(sentence) <= 94, name
