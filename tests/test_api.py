"""The package from Python: what importing it costs, that options mean what flags mean, runs, and loading a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoint_runs import make_run
from conftest import write_corpus
from labelled_fixtures import write_ner
from object_store import BUCKET
from report_records import SUMMARY, make_records
from report_records import make_run as make_summarised_run
from transformers import AutoTokenizer, BertForMaskedLM, BertForTokenClassification

import domext_ray
from domext_ray import storage
from domext_ray.commands.main import main
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, DomextError, RunError, StorageError
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import load_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.runtime.stopping import Stopped
from domext_ray.storage import Place
from domext_ray.training.checkpoint import list_steps

FRESH = """
import sys
before = set(sys.modules)
{code}
found = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
ours = {{name for name in sys.modules if name.startswith("domext_ray.")}}
print(sorted(found - {{"domext_ray"}}), sorted(ours)[:3], sep="\t")
"""
HEAVY = {"torch", "ray", "transformers", "numpy", "pyarrow", "deepspeed", "matplotlib"}


def run_fresh(code: str, cwd: Path) -> tuple[list[str], list[str]]:
    """Others' modules, and modules of ours, of some code in a process of its own."""
    done = subprocess.run([sys.executable, "-c", FRESH.format(code=code)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found, ours = done.stdout.strip().split("\t")
    return eval(found), eval(ours)


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    assert run_fresh("import domext_ray", tmp_path) == ([], [])
    _, ours = run_fresh("import domext_ray; domext_ray.__version__; dir(domext_ray)", tmp_path)
    assert ours == []


def test_a_function_imports_nothing_heavy_before_it_is_called(tmp_path: Path) -> None:
    found, ours = run_fresh("from domext_ray import Run, finetune, load, pretrain; Run('x')", tmp_path)
    assert ours and not HEAVY & set(found)
    mistake = "try: domext_ray.pretrain(seeds=1)\nexcept ValueError as error: assert 'did you mean seed?' in str(error)"
    found, _ = run_fresh(f"import domext_ray\n{mistake}", tmp_path)
    assert not HEAVY & set(found)


def test_names() -> None:
    assert set(domext_ray.__all__) <= set(dir(domext_ray))
    for name in domext_ray.__all__:
        assert getattr(domext_ray, name) is not None
    assert domext_ray.__version__ == version("domext_ray")
    with pytest.raises(AttributeError, match=r"^module 'domext_ray' has no attribute 'pretrian'$"):
        domext_ray.pretrian  # noqa: B018
    with pytest.raises(ImportError):
        exec("from domext_ray import pretrian")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt", 4000)


def describe_call(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> str:
    """What a dry run in Python prints."""
    run = domext_ray.pretrain(*args, dry_run="full", **options)
    assert not run.directory.exists()
    return hide_free_memory(capsys.readouterr().out)


def describe_command(capsys: pytest.CaptureFixture[str], *flags: Any) -> str:
    """What a dry run of a command prints."""
    main(["pretrain", *map(str, flags), "--dry_run", "full"])
    return hide_free_memory(capsys.readouterr().out)


def hide_free_memory(shown: str) -> str:
    """Leave out what other programs of this machine change meanwhile."""
    hidden, number = re.subn(r"\([\d.]+ [MG]B are free", "(so much is free", shown)
    assert number == 2, shown  # of memory and of disk
    return hidden


def test_options_mean_what_flags_mean(
    text: Path, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preset, then a file, then options: the same plan to the last character."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: {heads: 2}\ntrain: {max_steps: 30, global_batch_size: 8}\n", encoding="utf-8")
    other = write_corpus(tmp_path / "other.txt", 400)
    given = describe_call(
        capsys,
        "af",
        base=tiny_base_folder,
        corpus=[text, str(other)],
        config=mine,
        train={"seq_length": np.int64(32), "tokens_per_second": 1000},
        run={"dir": tmp_path / "runs"},
        **{"train.max_steps": 20, "optim.lr": np.float32(0.5), "method.layers": "0-1", "train.eval_rows": 40},
    )
    flags = ["--config", mine, "--base", tiny_base_folder, "--corpus", f"{text},{other}"]
    flags += ["--train.seq_length", 32, "--train.tokens_per_second", 1000, "--run.dir", tmp_path / "runs"]
    flags += ["--train.max_steps", 20, "--optim.lr", 0.5, "--method.layers", "0-1", "--train.eval_rows", 40]
    assert given == describe_command(capsys, "af", *flags)
    assert "heads: 2" in given and "max_steps: 20" in given and "global_batch_size: 8" in given


@pytest.mark.parametrize("method", ["exbert", "bert"])
def test_a_method_has_its_preset(
    method: str, text: Path, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"train.tokens_per_second": 1000, "run.dir": tmp_path, "train.seq_length": 64}
    options |= {"method.module_hidden_size": 8, "method.module_ffn_size": 8} if method == "exbert" else {}
    given = describe_call(capsys, method, base=tiny_base_folder, corpus=text, **options)
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert given == describe_command(capsys, method, "--base", tiny_base_folder, "--corpus", text, *flags)


def test_fine_tuning_takes_a_run_and_lists(
    tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_ner(tmp_path / "made")
    grid = {"lr": [1e-3, 5e-5], "batch_size": (8, 16)}
    labelled = {"max_length": 32, "stride": 8}
    options = {"grid": grid, "labelled": labelled, "run": {"dir": tmp_path / "runs"}, "dry_run": True}
    run = domext_ray.finetune("ner", data, tiny_base_folder, against="general-mini", **options)
    given = capsys.readouterr().out
    flags = ["--task", "ner", "--data", data, "--model", tiny_base_folder, "--run.dir", tmp_path / "runs", "--dry_run"]
    flags += ["--grid.lr", "0.001,5e-05", "--grid.batch_size", "8,16", "--against", "general-mini"]
    flags += ["--labelled.max_length", 32, "--labelled.stride", 8]
    main(["finetune", *map(str, flags)])
    assert given == capsys.readouterr().out and "trainings: 4 of each model, 8 in all" in given
    assert not run.directory.exists() and run.directory.parent == tmp_path / "runs"


@pytest.mark.parametrize("verb", ["predict", "embed", "compare", "sweep"])
def test_a_function_does_what_its_verb_does(
    verb: str, text: Path, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run of both prints the same, and the function returns the folder, of which nothing is there."""
    runs = {"run.dir": tmp_path / "runs", "run.name": "made", "base": tiny_base_folder}
    sizes = {"train.seq_length": 32, "train.tokens_per_second": 1000, "dry_run": True}
    ner = write_ner(tmp_path / "made")
    positional, named, options = {
        "predict": ((), {"model": tiny_base_folder, "input": text, "output": tmp_path / "out"}, {"dry_run": True}),
        "embed": ((), {"model": tiny_base_folder, "input": text, "output": tmp_path / "out"}, {"dry_run": True}),
        "compare": ((["af", "full"],), {"corpus": text}, {**runs, **sizes, "seeds": 2, "tokens": 20000}),
        "sweep": ((["ner"], ner), {"corpus": text}, {**runs, **sizes, "method.ffn_units": 8}),
    }[verb]
    found = getattr(domext_ray, verb)(*positional, **named, **options)
    shown = capsys.readouterr().out
    given = dict(zip({"compare": ("methods",), "sweep": ("tasks", "data")}.get(verb, ()), positional, strict=True))
    given = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    main([verb, *(str(word) for name, value in {**given, **named, **options}.items() for word in (f"--{name}", value))])
    assert shown == capsys.readouterr().out and shown
    assert not found.exists() and found == (tmp_path / "out" if "output" in named else tmp_path / "runs" / "made")


def test_a_mistake_is_an_exception_of_one_sentence(tmp_path: Path) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"method": "exbrt"}, "'exbrt' is no method of pretrain; did you mean exbert?"),
        ({"train.max_step": 3}, "'train.max_step' is no option; did you mean train.max_steps?"),
        ({"lr": 3}, "'lr' is no option; did you mean optim.lr?"),
        ({"train": {"max_stepz": 3}}, "'train.max_stepz' is no option; did you mean train.max_steps?"),
        ({"train": 3}, "'train' is a group of options, not 3."),
        ({"train": {"max_steps": 3}, "train.max_steps": 3}, "'train.max_steps' is given twice; give it once."),
        ({"train.max_steps": "many"}, "--train.max_steps is 'many'; it must be a whole number."),
        ({"train.max_steps": None}, "--train.max_steps is None; it must be a whole number."),
        ({"train.max_steps": np.ones(2)}, "--train.max_steps is [1.0, 1.0]; it must be a whole number."),
        ({"optim.lr": -1.0}, "--optim.lr is -1.0; it must be above 0 and at most 1."),
        ({"base": Path("/nope")}, "--base names '/nope', which does not exist; give general-mini"),
        ({"config": "af_bas"}, "--config names 'af_bas', which does not exist; did you mean --preset af_base?"),
        ({"corpus": "/nope.txt", "dry_run": True}, "/nope.txt"),
    ]
    for options, says in mistakes:
        with pytest.raises(domext_ray.DomextError) as error:
            domext_ray.pretrain(**{"run.dir": tmp_path / "runs", **options})
        assert says in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="did you mean ner"):
        domext_ray.finetune("nerr", tmp_path)
    with pytest.raises(ConfigError, match="'vocab.sise' is no option; did you mean vocab.size"):
        domext_ray.prepare(corpus=tmp_path, **{"vocab.sise": 3})


def test_an_option_without_effect_is_said(
    text: Path, tiny_base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert domext_ray.prepare(base=tiny_base_folder, corpus=text, dry_run=True, **{"method.heads": 2}) is None
    printed = capsys.readouterr().out
    assert printed.startswith("warning: --method.heads has no effect in this job.\ncorpus: 1 files")


def test_a_run_says_what_it_is(tmp_path: Path) -> None:
    run = domext_ray.Run(make_summarised_run(tmp_path / "af", make_records()))
    assert run == domext_ray.Run(str(tmp_path / "af")) and run.summary == SUMMARY
    assert (run.export_dir, run.report) == (tmp_path / "af" / "export", tmp_path / "af" / "report.html")
    loss, steps = SUMMARY["domain"]["mlm_loss"], SUMMARY["train"]["steps"]
    assert repr(run) == (
        f"<Run {tmp_path / 'af'}: {steps:,} steps, held-out domain loss {loss['before']:.3f} -> {loss['after']:.3f}>"
    )


def test_a_run_that_has_not_ended_says_so(tmp_path: Path) -> None:
    for kind in (domext_ray.Run, domext_ray.FinetunedRun):
        run = kind(tmp_path)
        assert repr(run) == f"<{kind.__name__} {tmp_path}: not finished>"
        with pytest.raises(RunError, match="summary.json is missing"):
            _ = run.summary


def predict(loaded: tuple[Any, Any], sentence: str = "the old house was near the river.") -> torch.Tensor:
    tokenizer, model = loaded
    assert not model.training
    with torch.no_grad():
        return model(**tokenizer(sentence, return_tensors="pt")).logits


def make_moved_run(folder: Path, base_folder: Path, step: int) -> None:
    """Save a checkpoint whose extensions have moved away from their zero start."""
    base, generator = load_base(str(base_folder)), torch.Generator().manual_seed(step)
    config = PretrainConfig(base=str(base_folder), method=MethodConfig(heads=1, ffn_units=8))
    model = ModelSpec(base, config.method).build()
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    make_run(folder, config, model, base, step)


@pytest.fixture
def run_dir(tiny_base_folder: Path, tmp_path: Path) -> Path:
    """A run at step 3."""
    make_moved_run(tmp_path / "run", tiny_base_folder, step=3)
    shutil.copytree(tiny_base_folder, tmp_path / "run" / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "run"


def test_a_run_loads_from_its_export_and_without_one(run_dir: Path, tiny_base_folder: Path) -> None:
    rebuilt = predict(domext_ray.load(run_dir))
    export_run(Place(run_dir), Place(run_dir / "export"))
    exported = domext_ray.load(domext_ray.Run(run_dir))
    assert isinstance(exported[1], DomextForMaskedLM)
    assert torch.equal(predict(exported), rebuilt) and torch.equal(
        predict(domext_ray.load(run_dir / "export")), rebuilt
    )
    assert not torch.allclose(predict(domext_ray.load(tiny_base_folder)), rebuilt, atol=1e-3)
    shutil.rmtree(run_dir / "checkpoints")
    assert torch.equal(predict(domext_ray.load(run_dir)), rebuilt), "the export is all that is left"


def test_a_run_in_a_bucket_loads_as_one_on_a_disk(run_dir: Path, objects: str, tmp_path: Path) -> None:
    rebuilt, bucket = predict(domext_ray.load(run_dir)), storage.Place(f"{BUCKET}/{tmp_path.name}/run")

    def copy() -> None:
        for name in storage.Place(run_dir).list_files():
            (bucket / name).put((run_dir / name).read_bytes())

    copy()
    for place in (domext_ray.Run(str(bucket)), bucket, str(bucket)):
        assert torch.equal(predict(domext_ray.load(place)), rebuilt)
    export_run(Place(run_dir), Place(run_dir / "export"))
    copy()
    (bucket / "checkpoints").delete()
    for place in (domext_ray.Run(bucket), bucket / "export", f"{bucket}/export"):
        assert torch.equal(predict(domext_ray.load(place)), rebuilt)
    with pytest.raises(BaseModelError, match=rf"^load names '{bucket}/nope', which does not exist; give a run,"):
        domext_ray.load(domext_ray.Run(bucket / "nope"))
    with pytest.raises(StorageError, match="there is no bucket s3://no-such-bucket; make it, or give another"):
        domext_ray.load("s3://no-such-bucket/runs/af")
    with pytest.raises(DomextError, match=rf"--model is '{bucket}'; it must be a hub id, or a folder"):
        domext_ray.finetune("ner", tmp_path, domext_ray.Run(bucket))
    assert repr(domext_ray.FinetunedRun(bucket)) == f"<FinetunedRun {bucket}: not finished>"


def test_an_export_that_is_older_than_the_run_is_passed_over(run_dir: Path, tiny_base_folder: Path) -> None:
    export_run(Place(run_dir), Place(run_dir / "export"))
    old = predict(domext_ray.load(run_dir))
    make_moved_run(run_dir, tiny_base_folder, step=5)
    assert not torch.allclose(predict(domext_ray.load(run_dir)), old, atol=1e-3)
    assert torch.equal(predict(domext_ray.load(run_dir / "export")), old)


def test_bases_load_as_transformers_has_them(tiny_base_folder: Path) -> None:
    tokenizer, model = domext_ray.load(tiny_base_folder)
    assert type(model) is BertForMaskedLM
    own = AutoTokenizer.from_pretrained(tiny_base_folder), BertForMaskedLM.from_pretrained(tiny_base_folder).eval()
    assert torch.equal(predict((tokenizer, model)), predict(own))
    assert type(domext_ray.load("general-mini")[1]) is BertForMaskedLM


def test_a_damaged_folder_is_one_sentence(tiny_base_folder: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_base_folder / "config.json").read_text())
    for i, (name, content, says) in enumerate(
        (
            ("config.json", None, "cannot be loaded"),
            ("config.json", b'{"model_type": "gpt9"}', "cannot be loaded"),
            ("model.safetensors", b"no", "cannot be loaded"),
            (
                "config.json",
                json.dumps({**config, "num_hidden_layers": 3}).encode(),
                "lacks the tensor bert.encoder.layer.2",
            ),
        )
    ):
        folder = Path(shutil.copytree(tiny_base_folder, tmp_path / f"base{i}"))
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(BaseModelError) as error:
            domext_ray.load(folder)
        assert says in str(error.value) and "\n" not in str(error.value)


def test_a_place_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for place, says in (
        *((path, f"load names {path!r}, which does not exist; give a run,") for path in ("/nope", "./nope", "a/b/c")),
        ("file", "'file' is no folder; give a run,"),
        *((name, f"load names {name!r}, which is not on this machine, and HF_HUB") for name in ("nope", "nope/nope")),
    ):
        with pytest.raises(BaseModelError) as error:
            domext_ray.load(place)
        assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_a_run_without_a_checkpoint_is_told(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(RunError, match="holds no usable checkpoint"):
        domext_ray.load(run_dir)


def test_a_fine_tuned_run_of_several_models_names_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("trainings", "export/entities", "export/relations"):
        (run / name).mkdir(parents=True)
    for name in ("config.yaml", "export/entities/config.json", "export/relations/config.json"):
        (run / name).write_text("{}")
    with pytest.raises(RunError, match=r"one model per step of its task \(entities, relations\); give the folder"):
        domext_ray.load(run)
    shutil.rmtree(run / "export")
    with pytest.raises(RunError, match="has no export; fine-tune again with export=True"):
        domext_ray.load(run)


def read_parts(folder: Any) -> list[dict[str, Any]]:
    """The rows that a prediction wrote."""
    return list(pq.read_table(Path(folder) / "predictions").to_pylist())


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_from_text_to_a_fine_tuned_model(local_ray: None, text: Path, tiny_base_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C stops a run and leaves the program alone; the same call goes on; its model is fine-tuned and loaded."""
    shape = {"train.seq_length": 32, "train.global_batch_size": 8, "train.eval_rows": 40, "engine.precision": "fp32"}
    common = {"base": tiny_base_folder, "corpus": text, "run.dir": tmp_path / "runs", "method.ffn_units": 8, **shape}
    prepared = domext_ray.prepare(
        base=tiny_base_folder, corpus=text, **{"run.dir": tmp_path / "runs", "train.seq_length": 32}
    )
    assert prepared is not None and prepared.num_rows("train") > 400
    handler = signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)  # ignored where a shell runs the tests in the background
    checkpoints = tmp_path / "runs" / "af" / "checkpoints"
    schedule = {"optim.decay_steps": 5000, "train.evaluate_every": 5000, "train.save_every": 5}
    threading.Thread(target=interrupt_after, args=(checkpoints,), daemon=True).start()
    with pytest.raises(Stopped, match=r"Ctrl-C"):
        domext_ray.pretrain("af", **common, **schedule, **{"train.max_steps": 5000})
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)
    done = max(list_steps(Place(checkpoints)))
    run = domext_ray.pretrain("af", **common, **schedule, **{"train.max_steps": done + 5})
    assert run.summary["train"]["steps"] == done + 5 and f"{done + 5:,} steps, held-out domain loss" in repr(run)
    assert run.report.is_file() and prepared.folder.parent == tmp_path / "runs" / ".corpora"
    assert isinstance(domext_ray.load(run)[1], DomextForMaskedLM)
    tuned = domext_ray.finetune(
        "ner",
        write_ner(tmp_path / "made"),
        run,
        grid={"lr": [6e-3], "batch_size": 8, "epochs": 6},
        labelled={"max_length": 32, "stride": 8},
        run={"name": "ner", "dir": tmp_path / "runs"},
        **{"engine.precision": "fp32", "optim.dropout": 0.0},
    )
    assert tuned.metric == "f1.micro" and tuned.scores.keys() == {"dev", "test"} and tuned.scores["test"] > 0.6
    shown = ", ".join(f"{tuned.scores[split]:.3f} on {split}" for split in ("dev", "test"))
    assert repr(tuned) == f"<FinetunedRun {tmp_path / 'runs' / 'ner'}: f1.micro {shown}>"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "the drug and the heart"}\n{"body": ""}\n', encoding="utf-8")
    found = domext_ray.predict(tuned, rows, tmp_path / "found", field="body", scale={"workers": 1})
    assert [row["id"] for row in read_parts(found)] == ["rows.jsonl:1", "rows.jsonl:2"]
    vectors = domext_ray.embed(run, rows, tmp_path / "vectors", field="body", scale={"workers": 1})
    assert [row["vector"] is None for row in read_parts(vectors)] == [False, True]
    tokenizer, model = domext_ray.load(tuned)
    assert type(model).__name__ == "DomextForTokenClassification" and "B-Drug" in model.config.id2label.values()
    plain = domext_ray.finetune(
        "ner",
        tmp_path / "made",
        tiny_base_folder,
        grid={"lr": 6e-3, "batch_size": 8, "epochs": 1},
        labelled={"max_length": 32, "stride": 8},
        run={"name": "plain", "dir": tmp_path / "runs"},
        **{"engine.precision": "fp32"},
    )
    assert isinstance(domext_ray.load(plain)[1], BertForTokenClassification)


def interrupt_after(checkpoints: Path) -> None:
    """Send Ctrl-C once there is a checkpoint."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (checkpoints.is_dir() and list_steps(Place(checkpoints))):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
