"""A study at the size of BERT-base: its methods differ as the presets *_base do, at the same rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from given_options import parse_config

from domext_ray.config.jobs import StudyConfig
from domext_ray.config.options.build import describe_difference, to_dict
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.studies.methods.arms import choose_presets, keeps, make_configs
from domext_ray.studies.methods.study import run_study

SHIPPED, BASE_SIZE = (
    parse_config(StudyConfig, name, ("--seconds", "9")).presets for name in ("compare", "compare_base")
)
ALONE = {
    **{"full": "bert_base", "lora": "lora_base", "bottleneck": "bottleneck_base", "exbert": "exbert_base"},
    **{"af": "af_base", "af_routed": "af_routed_base"},
}
"""The preset of a training job by the method of a study."""


@pytest.fixture(scope="module")
def arms() -> dict[str, PretrainConfig]:
    """All methods of the study, resolved."""
    flags = ("--tokens", "1000", "--budget", "0", "--replay.corpus", "self", "--methods", ",".join(BASE_SIZE))
    config = parse_config(StudyConfig, "compare_base", flags)
    presets = choose_presets(config)
    assert presets == BASE_SIZE and BASE_SIZE.keys() == SHIPPED.keys(), "nothing is taken over from compare"
    return {name: make_configs(config, name, preset)[name] for name, preset in presets.items()}


def test_methods_differ_in_method_words_and_rate_only(arms: dict[str, PretrainConfig]) -> None:
    plain, shared = PretrainConfig(), {}
    for name, config in arms.items():
        if keeps(BASE_SIZE[name]):  # what it keeps to on general text is part of the method
            own = {field: getattr(plain.objective, field) for field in ("keep", "keep_weight", "mask_prob")}
            config = replace(config, objective=replace(config.objective, **own), replay=plain.replay)
        optim = replace(config.optim, lr=plain.optim.lr)
        shared[name] = replace(config, method=plain.method, vocab=plain.vocab, optim=optim)
    for name, config in shared.items():
        assert not describe_difference(to_dict(shared["full"]), to_dict(config)), name


@pytest.mark.parametrize("name", ALONE)
def test_a_method_is_that_of_its_preset(arms: dict[str, PretrainConfig], name: str) -> None:
    """The rate and the setting; a study decides when a run ends, and what LoRA and new words are part of."""
    found, alone = arms[name], parse_config(PretrainConfig, ALONE[name])
    assert (found.optim.lr, found.optim.weight_decay) == (alone.optim.lr, alone.optim.weight_decay)
    assert (found.base, found.prepare, found.vocab) == (alone.base, alone.prepare, alone.vocab)
    assert (found.objective, found.replay.frac) == (alone.objective, alone.replay.frac)
    assert replace(found.train, max_steps=0, epochs=1.0) == alone.train
    if name != "lora":
        assert replace(found.method, name=alone.method.name) == alone.method


@pytest.mark.parametrize(
    ("flags", "is_warned"), [((), True), (("--rates", "1e-4,1e-3"), False), (("--optim.lr_width", "32"), False)]
)
def test_rates_for_bases_of_another_size_are_a_warning(
    tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], is_warned: bool
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The old tree is near the small house {i}.\n" for i in range(90)))
    given = ("--base", str(tiny_base_folder), "--corpus", str(tmp_path / "text.txt"), "--run.dir", str(tmp_path))
    shape = ("--methods", "full,biases", "--tokens", "1000", "--train.seq_length", "32", "--dry_run")
    run_study(parse_config(StudyConfig, "compare_base", (*given, *shape, *flags)))
    shown = capsys.readouterr().out
    assert shown.count("warning: the preset has rates for bases of width 768, and") == is_warned
    assert ("give --rates, or a preset for bases of that width" in shown) == is_warned
