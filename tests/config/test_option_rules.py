"""Every rule of an option, and of options beside each other, is told in one sentence that names them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from given_options import parse_config

from domext_ray.commands.job import configure
from domext_ray.commands.main import JOBS
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.method import KNOWN_METHODS
from domext_ray.config.options.build import (
    build,
    dump_yaml,
    from_dict,
    identity_of,
    read_file,
    read_flags,
    read_values,
    to_dict,
)
from domext_ray.config.options.declare import read_seconds
from domext_ray.config.options.kinds import list_options, read_comments
from domext_ray.config.pretrain import PretrainConfig, TrainConfig
from domext_ray.errors import ConfigError, hide_passwords
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place

ALONE = "--replay.corpus none --method.heads 0 --method.ffn_units 0"
WITHOUT_BASE = "--base none --vocab.size 300"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("corpus", "notes.txt,s3://KEY:s3cr3t@bucket/texts"),
        ("corpus", ["notes.txt", "s3://KEY:s3cr3t@bucket/texts"]),
        ("run.dir", "s3://KEY:s3cr3t@bucket/runs"),
        ("base", "https://s3cr3t@host/base"),
        ("mixture.parts", "{more: {corpus: 's3://KEY:s3cr3t@bucket/texts'}}"),
        ("mixture.parts", {"more": {"corpus": "s3://KEY:s3cr3t@bucket/texts"}}),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(option: str, value: Any) -> None:
    """Options are shown, and kept in config.yaml, on pages and by trackers."""
    with pytest.raises(ConfigError, match=r"://\*\*\*@.*; it must be an address without a password") as raised:
        build(PretrainConfig, [read_values(PretrainConfig, {option: value})])
    assert str(raised.value).startswith(f"--{option} is ") and "s3cr3t" not in str(raised.value)


def test_a_revision_of_the_hub_is_no_password() -> None:
    corpus = "hf://squad:plain@main,hf://owner/name@refs/convert/parquet,notes@home.txt"
    assert build(PretrainConfig, [read_values(PretrainConfig, {"corpus": corpus})]).corpus == corpus
    assert hide_passwords(corpus) == corpus


PAIR, WHOSE = "--prepare.pair a,b", "--prepare.group_field who"
VECTORS = "--replay.corpus none --objective.kind infonce"
GROUPS = f"{VECTORS} --objective.views crop --objective.group_rows 4 --train.global_batch_size"
CAPTURE = "--engine.capture true --engine.fixed_shapes true --prepare.packed true --replay.corpus none"
NAMES, WEIGHTS = (
    ("domain", "general", "a b", "''", "a/b"),
    ("0.5: 1", "0: 1, 1: 2", "0: 1, 0.6: 2, 0.5: 3", "0: 1, half: 2", ""),
)
ONE, WEIGHT = "--mixture.parts.more", "--mixture.parts.more.weight"
PARTS = {
    "{corpus: x, wieght: 2}": f"{ONE} is 'wieght'; it must be of corpus, weight, keep",
    "{corpus: x, weight: -1}": f"{WEIGHT} is -1; it must be from 0 to 1,000,000",
    **dict.fromkeys(("{corpus: x, weight: 0}", "{corpus: x, weight: {0: 0, 0.5: 0}}"), "must be above 0 somewhere"),
    **{f"{{corpus: x, weight: {{{weight}}}}}": "ascending from 0 to below 1" for weight in WEIGHTS},
    "{corpus: x, keep: maybe}": f"{ONE}.keep is 'maybe'; it must be true or false",
    "x": "it must be options of a part, such as {corpus: more.txt, weight: 2}",
}
"""Parts of a mixture that are none, and what is said."""
RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "pretrain af": (
        ("--train.max_steps 0", "--train.max_steps"),
        ("--train.max_steps -5", "--train.max_steps", "-5"),
        ("--train.max_seconds -1", "--train.max_seconds", "-1"),
        ("--optim.lr 0", "--optim.lr", "above 0"),
        ("--optim.lr 1e4", "--optim.lr is 10000.0; ", "at most 1"),
        ("--optim.beta1 1", "--optim.beta1", "below 1"),
        ("--optim.warmup_steps 50 --optim.decay_steps 50", "--optim.warmup_steps", "--optim.decay_steps"),
        ("--engine.zero_stage 7", "--engine.zero_stage", "7"),
        ("--engine.precision fp16", "--engine.precision", "fp16", "bf16"),
        ("--engine.compile true --engine.zero_stage 3", "--engine.compile", "--engine.zero_stage"),
        ("--engine.fixed_shapes true", "--engine.fixed_shapes", "--prepare.packed true"),
        ("--engine.capture true", "--engine.capture", "--engine.fixed_shapes true"),
        (f"{CAPTURE} --engine.zero_stage 1", "--engine.capture", "false with --engine.zero_stage 1."),
        (f"{CAPTURE} --engine.compile true", "--engine.capture", "false with --engine.compile true."),
        (f"{CAPTURE} --engine.activation_checkpointing true", "--engine.capture", "checkpointing true."),
        (f"{CAPTURE} --scale.num_workers 1-2", "--engine.capture", "false unless one worker trains, on a GPU"),
        (f"{CAPTURE} --scale.use_gpu false", "--engine.capture", "false unless one worker trains, on a GPU"),
        ("--engine.base_dtype bf16 --engine.precision fp32", "--engine.base_dtype", "--engine.precision"),
        ("--method.heads -1", "--method.heads", "-1"),
        ("--method.layers abc", "--method.layers", "abc"),
        ("--method.trains nothing", "--method.trains", "nothing", "extensions"),
        (f"{ALONE} --method.trains top_layers", "--method.top_layers"),
        ("--method.adapter 'my adapter'", "--method.adapter", "my adapter"),
        ("--method.bottleneck_place middle", "--method.bottleneck_place", "middle"),
        ("--method.module_hidden_size 12", "--method.module_ffn_size", "12"),
        ("--method.trainable_budget 1.5", "--method.trainable_budget", "1.5"),
        ("--method.active_adapters other", "--method.active_adapters", "other"),
        ("--objective.mask_prob 0", "--objective.mask_prob", "between 0 and 1"),
        ("--objective.mask_prob 2", "--objective.mask_prob", "2"),
        ("--objective.kind left_to_right", "--objective.kind", "left_to_right", "causal"),
        ("--objective.kind causal --objective.next_sentence true", "next_sentence", "false with"),
        ("--objective.kind infonce --objective.next_sentence true", "next_sentence", "no pairs"),
        ("--objective.kind infonce", "--replay.corpus is 'self' (", "which keeps nothing"),
        (f"{VECTORS} {WITHOUT_BASE}", "--objective.kind is 'infonce'; ", "masked or causal when --base is none"),
        (f"{VECTORS} --vocab.size 10", "--vocab.size is 10; ", "left out with --objective.kind infonce"),
        (f"{VECTORS} --prepare.packed true", "--prepare.packed is True; ", "a row has one vector"),
        (f"{VECTORS} --train.dropout 0", "--train.dropout is 0.0; it must be above 0 ", "(or give crop)"),
        (f"{GROUPS} 16 --scale.num_workers 5", "--scale.num_workers is 5; ", "at most 4, for each worker"),
        (f"{GROUPS} 18", "--objective.group_rows is 4; ", "a divisor of ", "_size (18)"),
        (f"{GROUPS} 16 --train.micro_batch_size 2", "--train.micro_batch_size is 2; ", "multiple"),
        ("--objective.group_rows 1", "--objective.group_rows is 1"),
        ("--objective.temperature 0", "--objective.temperature is 0.0"),
        ("--objective.views other", "--objective.views is 'other'"),
        ("--objective.pooling max", "--objective.pooling is 'max'"),
        ("--train.seq_length 4", "--train.seq_length", "8 or more"),
        ("--train.long_seq_length 64", "--train.long_seq_length", "--train.seq_length"),
        ("--train.dropout 1", "--train.dropout", "below 1"),
        ("--train.micro_batch_size 33", "--train.micro_batch_size", "33"),
        ("--scale.num_workers 0", "--scale.num_workers", "1 or more"),
        ("--run.keep_checkpoints 0", "--run.keep_checkpoints", "1 or more"),
        *((f"--mixture.parts '{{more: {part}}}'", says) for part, says in PARTS.items()),
        *(
            (f'--mixture.parts "{{{name}: {{corpus: x}}}}"', "names of letters, digits, _ and -, other than d")
            for name in NAMES
        ),
        *((f"--prepare.pair {pair}", "two fields with a comma") for pair in ("a", "a,b,c", "a,", "'a, a'")),
        (f"{PAIR} --prepare.field b", "--prepare.field is 'b'; ", "left out with --prepare.pair"),
        (PAIR, "--prepare.pair is 'a,b'; ", "without --objective.kind infonce"),
        (f"{PAIR} {VECTORS} --objective.views crop", "--objective.views is 'crop'; ", "left out with --prepare.pair"),
        (f"{WHOSE} --prepare.held_out_by block", "--prepare.held_out_by", "auto or group with --prepare.group_field"),
        (f"{WHOSE} --prepare.field who", "--prepare.group_field", "another field than --prepare.field"),
        ("--prepare.held_out_by group", "--prepare.held_out_by", "given with --prepare.group_field"),
        ("--replay.corpus none --vocab.min_groups 3", "--vocab.min_groups", "left out without --prepare.group_field"),
        ("--vocab.size 9 --vocab.skip known", "--vocab.skip is 'known'; ", "empty without --vocab.words or --vocab.p"),
        ("--vocab.words w.txt --vocab.skip knwon", "--vocab.skip", "one of known, doublets, special, malformed"),
        ("--vocab.words w.txt --vocab.skip known,known", "--vocab.skip", "different ones"),
        ("--scale.use_gpu 3", "--scale.use_gpu", "auto, true or false"),
        ("--prepare.document paragraph", "--prepare.document", "paragraph", "blank_line"),
        ("--prepare.held_out_frac 0.9", "--prepare.held_out_frac", "0.9"),
        ("--prepare.min_document_chars 0", "--prepare.min_document_chars", "1 or more"),
        ("--base none", "--replay.corpus", "self"),
        ("--base none --replay.corpus none", "--vocab.size"),
        (f"{WITHOUT_BASE} --replay.corpus none", "--method.trains", "all"),
    ),
    "pretrain bert": (
        ("--method.name lora", "--method.name", "lora"),
        ("--base none --vocab.size 10", "--vocab.size", "64 or more"),
        (f"{WITHOUT_BASE} --mixture.parts '{{m: {{corpus: x, keep: true}}}}'", "--objective.keep is 'kl' ("),
        (f"{WITHOUT_BASE} --train.seq_length 1024", "--train.seq_length", "1024"),
    ),
    "pretrain exbert": (("--vocab.min_frequency 0", "--vocab.min_frequency", "1 or more"),),
    "pretrain bottleneck": (("--method.bottleneck_std 0", "--method.bottleneck_std", "above 0"),),
    "build vocab": (("--vocab.size -1", "--vocab.size", "-1"),),
    "finetune": (
        ("--labelled.max_length 32", "--labelled.stride is 32 (its default); ", "half of --labelled.max_length (16)."),
        ("--labelled.max_length 32 --labelled.stride 32", "--labelled.stride is 32; it must be from 0 to half"),
        ("--grid.restarts 0", "--grid.restarts", "from 1 to 1,000"),
        ("--grid.batch_size 1.5", "--grid.batch_size", "1.5"),
        ("--engine.fused true", "--engine.fused", "false in fine-tuning"),
        ("--engine.joined true", "--engine.joined", "auto in fine-tuning"),
        ("--engine.fixed_shapes true", "--engine.fixed_shapes", "false in fine-tuning"),
        ("--features.layers 9-3", "--features.layers", "9-3"),
        ("--labelled.stride 100", "--labelled.stride", "100"),
        ("--num_resamples 1", "--num_resamples", "100 or more"),
    ),
    "export hf": (
        ("", "--run"),
        ("--run . --format zip", "--format", "zip"),
        ("--run . --format peft --dtype float16", "--dtype", "float16"),
        ("--run . --scale 0.7", "--output", "a folder of its own with --scale 0.7"),
    ),
    "compare runs": (("", "--runs"), ("--runs .,.", "--runs")),
    "compare": (
        ("--seconds 5 --methods af,af", "--methods"),
        ("--seconds 5 --seeds 0", "--seeds"),
        ("--seconds 5 --budget 2", "--budget"),
    ),
    "evaluate forgetting": (
        ("--corpus a.txt", "--models"),
        ("--models general-mini --corpus a.txt --mask_frac 2", "--mask_frac", "2"),
        ("--models general-mini", "--corpus is ''", "at least one file or folder"),
        ("--models general-mini --scales 0.5,1", "--scales", "1"),
        (f"--models general-mini --corpus a.txt {PAIR}", "--prepare.pair is 'a,b'; ", "left out here"),
    ),
    "bank": (
        ("", "--bank"),
        ("--bank no --name x", "--name", "--add"),
        ("--bank no --add a --name a --remove b", "--add", "--remove"),
    ),
    "sweep": (
        ("--search.trials 0", "--search.trials", "1 or more"),
        ("--search.objectives f2", "--search.objectives", "f2"),
        ("--budget.steps 5 --budget.tokens 5", "--budget"),
        ("--scale.num_workers 2", "--scale.num_workers", "2"),
        ("--finetune.optim.top_layers 3", "top_layers_lr is 0.0 (its default); ", "when --finetune.optim.top_layers"),
        ("--finetune.grid.patience 2 --finetune.grid.score_every_epoch no", "true with --finetune.grid.patience."),
        ("--finetune.run.name x", "--finetune.run.name is 'x'; it must be left out: the sweep decides it."),
    ),
    "serve": (("--model x --limit.texts 2000", "--limit.queue is 1024 (its default); ", "least --limit.texts (2000)"),),
    "ablate": (("--study nothing", "--study", "nothing"), ("--study sigma --sigmas 2", "--sigmas", "2")),
}
"""Verbs -> what follows one, and parts that the sentence must have. Others' are in golden/mistakes.json."""


def test_a_broken_rule_is_one_sentence() -> None:
    for verb, rules in RULES.items():
        for args, *says in rules:
            with pytest.raises(ConfigError) as raised:
                configure(JOBS[verb], read_flags(JOBS[verb].config_class, shlex.split(args)))
            message = str(raised.value)
            assert all(part in message for part in says) and "\n" not in message, (verb, args, message)


def test_an_option_that_is_gone_says_what_to_do_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks for it is refused; what 0.1.0 wrote has it, and is read as before."""
    instead = "is no option any more.*; domext evaluate forgetting --scales measures a run at them"
    with pytest.raises(ConfigError, match=f"^--train.eval_scales {instead}"):
        read_flags(PretrainConfig, ["--train.eval_scales", "auto"])
    with pytest.raises(ConfigError, match=f"^'train.eval_scales' {instead}"):
        read_values(PretrainConfig, {"train": {"eval_scales": "auto"}})
    written = tmp_path / "config.yaml"
    written.write_text("train:\n  max_steps: 7\n  eval_scales: [0.5]\n", encoding="utf-8")
    for _ in range(2):  # a job reads a file more than once, and says it once
        assert [*read_file(PretrainConfig, written)] == ["train.max_steps"]
    assert re.fullmatch(f"note: {written}, line 3: train.eval_scales {instead}.*\n", capsys.readouterr().out)
    assert read_config(Place(tmp_path), PretrainConfig).train.max_steps == 7
    assert "eval_scales" not in list_options(TrainConfig)


def test_a_cadence_is_steps_or_a_time() -> None:
    for given, value in (("200", 200), ("1e3", 1000), ("15m", "15m"), ("1.5h", "1.5h")):
        config = parse_config(PretrainConfig, "", ["--train.save_every", given, "--train.evaluate_every", given])
        assert config.train.save_every == config.train.evaluate_every == value
        assert f"  save_every: {value}\n" in dump_yaml(config)
        assert from_dict(PretrainConfig, to_dict(config)) == config
    rule = "it must be steps, 1 or more, or a time, such as 90s, 15m or 2h"
    for wrong in (0, -1, 1.5, True, "0s", "0.0m", "15min", "m", "-5m", "1e3s", "15M", "", [200]):
        with pytest.raises(ConfigError, match=f"--save_every is .*; {rule}"):
            TrainConfig(save_every=wrong)  # type: ignore[arg-type]
    for text, seconds in (("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0)):
        assert read_seconds(text) == seconds


SHIPPED = {"af": "af", "bert": "full", "bottleneck": "bottleneck", "exbert": "exbert", "lora": "lora"}
"""The presets of methods, and what each is called."""


def read_named(preset: str, *flags: str) -> PretrainConfig:
    return parse_config(PretrainConfig, preset, flags)


def test_a_known_name_is_one_methods() -> None:
    fitting: dict[str, set[str]] = {"bert": {"full"}}
    fitting |= dict.fromkeys(("fl_tuning", "top_layers", "layer_norms", "biases"), set())
    for name, (preset, own) in itertools.product(KNOWN_METHODS, SHIPPED.items()):
        if own in fitting.get(name, {name}):
            assert read_named(preset, "--method.name", name).method.name == name
        else:
            with pytest.raises(ConfigError, match=f"--method.name is '{name}'; it must be .*name of your own"):
                read_named(preset, "--method.name", name)
    assert read_named("bert", "--method.name", "clinic-a").method.name == "clinic-a"


def test_sizes_that_the_name_says_are_taken() -> None:
    for preset, flags in (
        ("af", "--method.name fl_tuning --method.heads 0"),
        ("af", "--method.name af --method.heads 0"),
        ("af", "--method.name LoRA --method.heads 0 --method.ffn_units 0 --method.lora_rank 8"),
        ("exbert", "--method.name exbert --method.trains all"),
        ("exbert", "--method.name exbert --method.module_hidden_size 0 --method.module_ffn_size 0"),
        ("af", "--method.name biases --method.heads 0 --method.ffn_units 0 --method.trains biases"),
    ):
        read_named(preset, *flags.split())


def test_a_file_that_says_a_name_alone_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("corpus: a.txt\nmethod:\n  name: lora\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'lora' \(.*mine.yaml, line 3\); it must be bert, full"):
        read_named("bert", "--config", str(path))


def test_a_presets_name_that_no_longer_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--method.trains", "adapter", "--method.bottleneck_size", "64")
    parse_config(FinetuneConfig, "finetune", flags)
    assert "warning: --method.name is 'full', and what trains is bottleneck." in capsys.readouterr().out
    parse_config(FinetuneConfig, "finetune", (*flags, "--method.name", "bottleneck"))
    assert capsys.readouterr().out == ""


def test_a_stored_run_of_a_wrong_name_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From before names were looked at, or a sweep's trial, whose sizes the space changed."""
    values = to_dict(read_named("bert"))
    values["method"]["name"] = "lora"
    stored = from_dict(PretrainConfig, values)
    assert stored.method.name == "lora"
    (tmp_path / "config.yaml").write_text(dump_yaml(stored), encoding="utf-8")
    assert read_named("af", "--config", str(tmp_path / "config.yaml")) == stored
    assert "warning: --method.name is 'lora', and what trains is bert." in capsys.readouterr().out


MIXTURE = {"pubmed": {"corpus": "pubmed/*.txt", "weight": {0: 1, 0.5: 3}}, "guidelines": {"corpus": "guidelines.txt"}}


def make(parts: dict[str, Any] = MIXTURE, **more: Any) -> PretrainConfig:
    return from_dict(PretrainConfig, {"mixture": {"parts": parts}, **more})


def test_shares_are_exact_and_sum_to_1() -> None:
    config = make(replay={"corpus": "general.txt", "frac": 0.1})
    assert [part.name for part in config.parts] == ["general", "guidelines", "pubmed"]
    assert [part.keep for part in config.parts] == [True, False, False]
    tenth = Fraction(1, 10)
    assert config.part_shares == [
        (Fraction(0), (3 * tenth, tenth, 3 * tenth, 3 * tenth)),
        (Fraction(1, 2), (Fraction(9, 50), tenth, Fraction(9, 50), Fraction(27, 50))),
    ]
    assert make({}).part_shares == [(Fraction(0), (Fraction(1),))]


def test_an_identity_survives_json_and_yaml_and_does_not_depend_on_how_it_is_written(tmp_path: Path) -> None:
    config = make()
    assert json.loads(json.dumps(identity_of(config))) == identity_of(config)
    assert identity_of(make({**{name: MIXTURE[name] for name in reversed(MIXTURE)}})) == identity_of(config)
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    assert parse_config(PretrainConfig, args=["--config", str(path)]) == config
    text = "{guidelines: {corpus: guidelines.txt}, pubmed: {corpus: pubmed/*.txt, weight: {0: 1.0, '0.5': 3}}}"
    assert parse_config(PretrainConfig, args=["--mixture.parts", text]) == config


def test_a_run_without_parts_is_what_it_was() -> None:
    assert identity_of(PretrainConfig())["mixture"] == {"weight": 1.0}


@dataclass(frozen=True)
class _Commented:
    beside: int = 0  # beside it
    # above it, where one line
    # has too little room
    above: int = 0
    nothing: int = 0


def test_the_help_of_an_option_is_the_whole_comment() -> None:
    texts = {"beside": "beside it", "above": "above it, where one line has too little room", "nothing": ""}
    assert read_comments(_Commented) == texts
