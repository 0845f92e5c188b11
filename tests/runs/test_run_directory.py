"""What a run's directory says of itself: whose it is, and whether its files are whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domext_ray.commands.main import JOBS
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.options.build import identity_of, to_dict
from domext_ray.config.pretrain import EngineConfig, SettledConfig, TrainConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.export.folder import ExportRecord, new_export
from domext_ray.finetuning.finetuned import rebuild_finetuned
from domext_ray.pretraining.plan import is_finished
from domext_ray.report.summary import read_summary
from domext_ray.runs.run_directory import (
    TRAININGS,
    add_versions,
    check_identity,
    check_order,
    describe_other,
    keep_precision,
    lock_run,
    read_config,
    resolve_schedule,
    write_config,
    write_run,
)
from domext_ray.storage import Place
from domext_ray.training.start import find_start

CONFIG = SettledConfig(seed=7, train=TrainConfig(max_steps=12))


def lay_out(run: Path, config: SettledConfig = CONFIG) -> Path:
    """Write config.yaml and run.json."""
    run.mkdir()
    write_config(Place(run), config)
    write_run(Place(run), identity={**identity_of(config), "base_sha256": "b" * 64})
    return run


def test_config_comes_back(tmp_path: Path) -> None:
    assert read_config(Place(lay_out(tmp_path / "new")), SettledConfig) == CONFIG


def test_a_run_goes_on_in_its_own_precision(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run", replace(CONFIG, engine=EngineConfig(precision="fp32")))
    assert keep_precision(CONFIG, Place(run)).engine.precision == "fp32"
    assert keep_precision(CONFIG, Place(tmp_path / "another")) == CONFIG
    asked = replace(CONFIG, engine=EngineConfig(precision="bf16"))
    assert keep_precision(asked, Place(run)) == asked
    (run / "config.yaml").write_text("damaged", encoding="utf-8")
    assert keep_precision(CONFIG, Place(run)) == CONFIG


def test_a_rule_that_a_run_lacks_is_told_once_and_another_one_is_refused(tmp_path: Path) -> None:
    run, versions = lay_out(tmp_path / "run"), add_versions(Place(tmp_path / "run"), 0)
    added = {"span_tokens": "long words are masked otherwise"}
    write_run(Place(run), order={"version": 1}, versions=versions)
    assert check_order(Place(run), {"version": 1, "span_tokens": 16}, added) == ["long words are masked otherwise"]
    write_run(Place(run), order={"version": 1, "span_tokens": 16})
    assert check_order(Place(run), {"version": 1, "span_tokens": 16}, added) == []
    for order in ({"version": 1, "span_tokens": 8}, {"version": 2, "span_tokens": 16}, {"version": 1}):
        with pytest.raises(RunError, match="draws rows and masks in another way"):
            check_order(Place(run), order, {})


def test_a_config_of_something_else_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content, message in (
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("- 1\n- 2\n", "no YAML mapping"),
        ("seed: seven\n", "cannot be used"),
        ("method:\n  heads: -1\n", "--method.heads is -1"),
        ("no_such_option: 1\n", "cannot be used"),
    ):
        path.write_text(content)
        with pytest.raises(RunError, match=message) as raised:
            read_config(Place(tmp_path), SettledConfig)
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_fine_tuned_run_is_no_run_of_pre_training(tmp_path: Path) -> None:
    run, export = tmp_path / "clinic-ner", JOBS["export hf"]
    (run / TRAININGS).mkdir(parents=True)
    write_config(Place(run), FinetuneConfig())
    write_run(Place(run), identity=identity_of(FinetuneConfig()))
    for options in (["--format=peft"], ["--format=adapterhub"], ["--dtype=float16"]):
        with pytest.raises(RunError, match=rf"^{run} is a fine-tuned run, whose model is its export \({run}/"):
            export.start(export.read([f"--run={run}", *options]))
    with pytest.raises(RunError, match="^--init_from .* is a fine-tuned run, whose model is its export"):
        find_start(replace(CONFIG, init_from=str(run)), None, Place(tmp_path / "own"), {})
    with pytest.raises(RunError, match=f"^the run directory {run} belongs to a fine-tuned run; give another"):
        resolve_schedule(CONFIG, Place(run))
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "run.json", TRAININGS]
    (lay_out(tmp_path / "clinic") / "checkpoints").mkdir()
    with pytest.raises(RunError, match="clinic is a run of pre-training; give the directory of a fine-tuning run"):
        rebuild_finetuned(Place(tmp_path / "clinic"), torch.device("cpu"))


def test_what_has_moved_is_the_same(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run", replace(CONFIG, base="/old/base"))
    moved = {**identity_of(replace(CONFIG, base="/new/base")), "base_sha256": "b" * 64}
    check_identity(Place(run), moved)
    with pytest.raises(RunError, match=r"another run \(--base was /old/base and is /new/base now\)"):
        check_identity(Place(run), {**moved, "base_sha256": "c" * 64})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base_sha256", "--base '/a/base' has other weights than before"),
        ("base_sha256.words-12", "--base '/a/base' has other weights than before"),
        ("corpus_fingerprint", "--corpus 'texts' has other text, or the tokenizer other entries, than before"),
        ("replay_fingerprint", "--replay.corpus has other text, or the tokenizer other entries, than before"),
        ("part_fingerprint.web", "--mixture.parts web has other text, or the tokenizer other entries, than before"),
        ("data_sha256.0", "--data has other examples than before"),
    ],
)
def test_where_hashes_differ_a_sentence_says_what_changed(tmp_path: Path, name: str, said: str) -> None:
    write_run(Place(tmp_path), identity={"base": "/a/base", "corpus": "texts", name: "a" * 64})
    with pytest.raises(RunError) as error:
        check_identity(Place(tmp_path), {"base": "/a/base", "corpus": "texts", name: "b" * 64})
    assert f"belongs to another run ({said}); give another" in str(error.value)


def test_what_changed_is_said_in_words(tmp_path: Path) -> None:
    old = {"train": {"max_steps": 5, "lengths": [8, 16]}, "vocab": {}, "base_shape": {"act": "gelu"}, "corpus": "a.txt"}
    new = {
        "train": {"max_steps": 6, "lengths": []},
        "vocab": {"whole": True},
        "base_shape": {"act": "relu"},
        "corpus": "",
    }
    near = [{"optim": {"lr": rate}} for rate in (0.0012345678, 0.0012345679)]
    assert describe_other(*near) == ["--optim.lr was 0.0012345678 and is 0.0012345679 now"], "not twice the same"
    assert describe_other(old, new) == [
        "the base's act was gelu and is relu now",
        '--corpus was a.txt and is "" now',
        '--train.lengths was 8,16 and is "" now',
        "--train.max_steps was 5 and is 6 now",
        "--vocab.whole was left out and is true now",
    ]


def test_an_option_that_a_run_does_not_name_is_another(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run")
    with pytest.raises(RunError, match=r"belongs to another run \(--init_from has another checkpoint than before\)"):
        check_identity(Place(run), {**identity_of(CONFIG), "base_sha256": "b" * 64, "init_sha256": "d" * 64})


def test_a_run_of_another_format_is_refused(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run")
    (run / "config.yaml").write_text("an_option_of_theirs: 1\n", encoding="utf-8")
    path = run / "run.json"
    older = {**json.loads(path.read_text()), "format": 2}
    none = "no released version of domext_ray reads"
    for change, whose in (
        ({"versions": [{"domext_ray": "0.0.1"}, {"domext_ray": "0.0.2"}]}, r"domext_ray 0\.0\.2 wrote"),
        ({"versions": [{}]}, none),
        ({"versions": {}}, none),
        ({}, none),
        ({"format": 5}, "a later version of domext_ray reads"),
    ):
        path.write_text(json.dumps({**older, **change}))
        found = {**older, **change}["format"]
        says = rf"run\.json has format {found}, which {whose}; this version reads format 4; go on with that version, or"
        with pytest.raises(RunError, match=says):
            check_identity(Place(run), identity_of(CONFIG))
        with pytest.raises(RunError, match=says):  # options that this version does not have are explained by it
            read_config(Place(run), SettledConfig)


def test_a_damaged_record_is_one_sentence(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run")
    wrong = b'{"format": 4, "identity": {"optim": {"decay_steps": "x"}}}'
    for content in (b"", b'{"seed": 7, "tra', b"[1]", b"\x80", b"{}", b'{"format": 4}', wrong):
        (run / "run.json").write_bytes(content)
        with pytest.raises(RunError, match=r"run\.json .*--run\.name") as raised:
            resolve_schedule(CONFIG, Place(run))
        assert "\n" not in str(raised.value)


SUMMARY: dict[str, Any] = {
    "parameters": {"total": 10, "trainable": 1, "trainable_frac": 0.1},
    "domain": {
        name: {"before": 2.0, "after": 1.0 if name != "bits_per_character" else None}
        for name in ("mlm_loss", "mlm_accuracy", "bits_per_character")
    },
    "general": {"mlm_accuracy": {"before": None, "after": None}},
    "train": {"steps": 12, "tokens": 99, "tokens_per_second": 9.0, "data_wait_frac": 0, "wall_seconds": 11.0},
}


def lay_out_trained(folder: Path) -> Path:
    """A run that has said everything, and exported nothing."""
    run = lay_out(folder / "run")
    (run / "export").mkdir()
    (run / "report.html").touch()
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    return run


def test_a_damaged_summary_is_one_sentence(tmp_path: Path) -> None:
    run = lay_out_trained(tmp_path)
    path = run / "summary.json"
    assert read_summary(Place(path)) == SUMMARY
    for content in (json.dumps(SUMMARY)[:-40], "", "null", '{"train": {"steps": 12}}'):
        path.write_text(content)
        with pytest.raises(RunError, match=r"summary\.json .*delete it and run the job again") as raised:
            is_finished(Place(run), CONFIG)
        assert "\n" not in str(raised.value)
    for name, value in (("steps", "12"), ("steps", True), ("tokens", None), ("wall_seconds", [])):
        path.write_text(json.dumps({**SUMMARY, "train": {**SUMMARY["train"], name: value}}))
        with pytest.raises(RunError, match=f"train.{name} = .* wrong type"):
            read_summary(Place(path))


def test_a_run_without_its_options_is_not_finished(tmp_path: Path) -> None:
    run = lay_out_trained(tmp_path)
    assert not is_finished(Place(run), CONFIG), "its export is not whole"
    with new_export(Place(run / "export"), ExportRecord("huggingface", "run", 12)):
        pass
    assert is_finished(Place(run), CONFIG)
    (run / "config.yaml").write_text("train: {")
    assert not is_finished(Place(run), CONFIG)


def test_a_job_that_is_stopped_leaves_what_it_learned(tmp_path: Path) -> None:
    for error, is_kept in ((KeyboardInterrupt, True), (SystemExit, True), (RunError, True), (CorpusError, False)):
        run = tmp_path / error.__name__ / "new"
        with pytest.raises(error), lock_run(Place(run)):
            (run / "tokenizer").mkdir()
            raise error
        assert (run / "tokenizer").exists() == run.parent.exists() == is_kept
        with pytest.raises(error), lock_run(Place(tmp_path / "other" / "empty")):
            raise error
        assert not (tmp_path / "other").exists()


def test_a_run_with_what_is_gone_says_which_version_goes_on_with_it(tmp_path: Path) -> None:
    for group, option, value in (("objective", "kind", "tsdae"), ("method", "word_init", "distill")):
        run = lay_out(tmp_path / value)
        values = to_dict(CONFIG)
        values[group][option] = value
        (run / "config.yaml").write_text(json.dumps(values), encoding="utf-8")
        says = rf"^{run}/config.yaml has {group}.{option} {value}, which .* with domext_ray 0\.1\.0\.$"
        with pytest.raises(RunError, match=says):
            read_config(Place(run), SettledConfig)


def test_options_that_are_gone_make_no_run_another(tmp_path: Path) -> None:
    run, identity = lay_out(tmp_path / "run"), identity_of(CONFIG)
    older = {**identity, "objective": {**identity["objective"], "delete_prob": 0.6, "decoder_layers": 1}}
    write_run(Place(run), identity=older)
    check_identity(Place(run), identity)
