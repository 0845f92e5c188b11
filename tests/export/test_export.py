"""An export loads with torch and transformers only, gives the library's logits, and is never half there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_runs import as_rebuilt, make_run
from conftest import REPOSITORY
from huggingface_hub import ModelCard, metadata_load
from job_calls import call_job
from lone_process import WITHOUT_PROJECT
from object_store import BUCKET
from safetensors import safe_open
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForPreTraining,
)

from domext_ray.config.extensions.table import Units
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import PretrainConfig, VocabConfig
from domext_ray.errors import RunError, StorageError
from domext_ray.export.card import Terms, build_card, read_terms
from domext_ray.export.folder import ExportRecord, list_exported, new_export, read_export_record
from domext_ray.export.model_folder import CODE_FILES, export_model, export_run
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.models.source import open_model
from domext_ray.storage import Place
from domext_ray.text.vocabulary.extension import base_token_ids
from domext_ray.text.vocabulary.learn import import_words
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.start import RebuiltRun

LOAD_ALONE = (
    WITHOUT_PROJECT
    + """
import json
import sys
import torch
import transformers as tf

torch.set_num_threads(1)
for folder in sys.argv[1:]:
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the old house was warm .", "a river"], padding=True, return_tensors="pt")
    model = tf.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    shapes = {}
    with torch.no_grad():
        logits = model(**batch).logits
        for name in ("", "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering"):
            other = getattr(tf, f"AutoModel{name}").from_pretrained(folder, trust_remote_code=True).eval()
            shapes[name] = list(other(**batch)[0].shape)
    print(json.dumps({"logits": logits.tolist(), "shapes": shapes}))
assert "domext_ray" not in sys.modules
"""
)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # For the processes that tests start: transformers copies an export's code below HF_HOME before it runs it.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def base(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The tiny BERT, with a licence."""
    folder = Path(shutil.copytree(tiny_base_folder, tmp_path_factory.mktemp("licensed") / "tiny-bert"))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A tiny BERT\n")
    return load_base(str(folder))


FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
CONFIG = PretrainConfig(method=MethodConfig(adapter="garden", heads=1, ffn_units=8))


def make_rebuilt(
    base: Base | None,
    config: PretrainConfig = CONFIG,
    name: str = "tiny",
    tokenizer_folder: Path | None = None,
    **options: Any,
) -> RebuiltRun:
    """A run whose trained tensors have moved away from their start."""
    config = replace(config, base=str(base.folder)) if base else config
    tokenizer = load_tokenizer(tokenizer_folder or base.folder)  # type: ignore[union-attr]
    size = base.config.vocab_size if base else len(tokenizer)
    options = {"vocab_size": size, "dropout": 0.1, "seed": config.seed, **options}
    model = ModelSpec(base, config.method, config.shape, **options).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return as_rebuilt(model.eval(), base, tokenizer, config, name)


def load_alone(folders: list[Path], cwd: Path) -> list[dict[str, Any]]:
    """Load exports where this project and what it needs cannot be imported; -I keeps the working folder out."""
    command = [sys.executable, "-I", "-c", LOAD_ALONE, *map(str, folders)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "custom code" not in done.stdout + done.stderr and "model of type" not in done.stderr, done.stderr
    assert done.stdout.count("\n") == len(folders), done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_run_of(
    base: Base, run_dir: Path, seed: int = 0, step: int = 3, recorded: Base | None = None
) -> tuple[Path, RebuiltRun]:
    """A run's directory with one checkpoint, and what is in it."""
    run = make_rebuilt(base, replace(CONFIG, seed=seed, corpus=f"{run_dir.parent}/notes.txt,~/letters.txt"))
    make_run(run_dir, run.config, run.model, recorded or base, step)
    run.tokenizer.save_pretrained(run_dir / "tokenizer")
    return run_dir, run


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_shared(folder: Path, tmp_path: Path) -> None:
    """No file that is passed on says where things lie on this machine."""
    for name, content in read_tree(folder).items():
        assert not [place for place in (tmp_path, Path.home()) if f"{place}/".encode() in content], name


def score(run: RebuiltRun, model: Any = None) -> torch.Tensor:
    """Logits of a run's model, or of another one for its tokenizer."""
    batch = run.tokenizer(["the old house was warm .", "a river"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return (run.model if model is None else model)(**batch).logits


def test_exports_load_alone_and_give_equal_logits(base: Base, tiny_roberta_folder: Path, tmp_path: Path) -> None:
    """One of heads and units, and one of new words beside byte-level BPE."""
    plain = make_rebuilt(base)
    before = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    export_model(plain, Place(tmp_path / "plain"))
    assert getattr(plain.model.config, "auto_map", None) is None, "exporting leaves the model as it was"
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.model.state_dict().items())
    with pytest.raises(KeyError, match="give trust_remote_code=True"):
        AutoModelForMaskedLM.from_pretrained(tmp_path / "plain")

    roberta = load_base(str(tiny_roberta_folder))
    (tmp_path / "words.txt").write_text("gardenhouse\n##house\n")
    size = roberta.config.vocab_size
    made = import_words(VocabConfig(words=str(tmp_path / "words.txt")), roberta.vocabulary, tmp_path / "vocab")
    pieces = base_token_ids(roberta.tokenizer, made.words)
    words = make_rebuilt(roberta, tokenizer_folder=made.folder, new_words=pieces)
    export_model(words, Place(tmp_path / "words"))
    again = AutoTokenizer.from_pretrained(tmp_path / "words")
    assert fingerprint_tokenizer(again) == fingerprint_tokenizer(words.tokenizer)
    assert again("a gardenhouse", add_special_tokens=False).input_ids[-1] == size

    (tmp_path / "elsewhere").mkdir()
    loaded = load_alone([tmp_path / "plain", tmp_path / "words"], tmp_path / "elsewhere")
    for found, run in zip(loaded, (plain, words), strict=True):
        expected = score(run)
        torch.testing.assert_close(torch.tensor(found["logits"]), expected, atol=1e-5, rtol=0)
        rows, length, _ = expected.shape
        heads = {"ForTokenClassification": [rows, length, 2], "ForSequenceClassification": [rows, 2]}
        assert found["shapes"] == {"": [rows, length, 32], "ForQuestionAnswering": [rows, length], **heads}
    assert expected.shape[-1] == size + 2


def test_an_exports_tokenizer_and_model_load_without_a_word(
    tiny_base_folder: Path,
    tiny_roberta_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    for source in (tiny_base_folder, tiny_roberta_folder):
        run, folder = make_rebuilt(load_base(str(source))), tmp_path / source.name
        tokenizer = run.tokenizer
        capfd.readouterr()
        export_model(run, Place(folder))
        again = AutoTokenizer.from_pretrained(folder)
        assert type(again) is type(tokenizer) and fingerprint_tokenizer(again) == fingerprint_tokenizer(tokenizer)
        start = open_model(str(folder)).load()
        assert (start.kind, start.config.hidden_act, start.config.model_type) == ("export", "gelu", "domext")
        assert capfd.readouterr() == ("", "")


def test_an_export_has_every_file_and_says_what_it_is(base: Base, tmp_path: Path) -> None:
    run, folder = make_rebuilt(base), tmp_path / "export"
    export_model(run, Place(folder))
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert names >= {"modules.json", "sentence_bert_config.json"}
    assert {name for name in names if name.endswith((".py", ".bin"))} == {*CODE_FILES}
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert len(modes) == 1, "every file is readable by the same people"
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata()["format"] == "pt"
    heads = "MaskedLM MultipleChoice PreTraining QuestionAnswering SequenceClassification TokenClassification".split()
    expected = ["AutoConfig", "AutoModel", *(f"AutoModelFor{head}" for head in heads)]
    assert sorted(json.loads((folder / "config.json").read_text())["auto_map"]) == expected
    own = REPOSITORY / "domext_ray" / "model" / "domext" / "modeling_domext.py"
    assert (folder / "modeling_domext.py").read_bytes() == own.read_bytes()
    header = metadata_load(folder / "README.md")
    assert "base_model" not in header, "a folder's name is no model of the hub"
    assert (header["license"], header["library_name"], header["pipeline_tag"]) == ("mit", "transformers", "fill-mask")
    card = (folder / "README.md").read_text()
    assert base.sha256 in card and "first read its `*_domext.py` files" in card
    assert f"{sum(param.numel() for param in run.model.parameters()):,}" in card
    check_shared(folder, tmp_path)


def test_an_export_is_replaced_only_by_a_complete_one(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, name="first"), Place(folder))

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(StorageError, match="No space left"):
            export_model(make_rebuilt(base, name="second"), Place(folder))
    assert "# first" in (folder / "README.md").read_text()
    export_model(make_rebuilt(base, name="third"), Place(folder))
    assert "# third" in (folder / "README.md").read_text()
    left = {path.name for path in tmp_path.iterdir()} - {"huggingface"}
    assert left == {"export"}, "a temporary folder was left behind"


def test_what_is_not_the_exports_own_is_never_replaced(base: Base, tmp_path: Path) -> None:
    run, made = make_rebuilt(base), tmp_path / "made"
    export_model(run, Place(made))

    def put(name: str, content: str) -> Callable[[Path], Path]:
        def edit(folder: Path) -> Path:
            shutil.copytree(made, folder)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
            return folder

        return edit

    cases: dict[str, tuple[str, Callable[[Path], Path]]] = {
        "text": ("no export of this project", write_chapter),
        "base": ("what the export is made from", lambda _: base.folder),
        "bert": ("no export of this project", lambda folder: Path(shutil.copytree(base.folder, folder))),
        "notes": ("notes.txt", put("notes.txt", "mine")),
        "git": (".git/config", put(".git/config", "[core]")),
        "edited": ("README.md", put("README.md", "My own words.")),
        "damaged": ("domext_export.json", put("domext_export.json", '{"format": ')),
    }
    for case, (name, edit) in cases.items():
        folder = edit(tmp_path / case)
        before = read_tree(folder)
        with pytest.raises(RunError, match=re.escape(name)):
            export_model(run, Place(folder))
        assert read_tree(folder) == before, case
        assert not list(tmp_path.glob(".*")), "a temporary folder was left behind"
    first = tmp_path / "first"
    export_model(make_rebuilt(base, PretrainConfig(method=FULL)), Place(first))
    before = read_tree(first)
    with pytest.raises(RunError, match="what the export is made from"):  # also where that was exported here
        export_model(make_rebuilt(load_base(str(first)), PretrainConfig(method=FULL)), Place(first))
    assert read_tree(first) == before


def write_chapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    return folder


def test_an_export_that_was_killed_half_way_is_no_export_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "export", Place.put

    def export(version: str) -> None:
        with new_export(Place(folder), ExportRecord("huggingface")) as temporary:
            for name in ("a", f"b{version}"):
                (temporary / name).write_text(version)

    def put(self: Place, *args: Any, **settings: Any) -> str:
        if self.name == "b2":
            raise OSError("killed")
        return real(self, *args, **settings)

    export("1")
    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(RunError, match="killed"):
        export("2")
    monkeypatch.undo()
    assert read_export_record(Place(folder)) is None
    with pytest.raises(RunError, match="half an export"):
        list_exported(Place(folder))
    export("3")
    assert list_exported(Place(folder)) == ["a", "b3", "domext_export.json"]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b3", "domext_export.json"]
    (folder / "mine").touch()
    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(RunError, match="mine: no part of the export"):
        export("2")


def test_a_run_is_exported_from_its_newest_checkpoint(base: Base, tmp_path: Path) -> None:
    make_run_of(base, tmp_path / "run", seed=7, step=1)
    run_dir, run = make_run_of(base, tmp_path / "run")
    assert read_export_record(Place(run_dir / "export")) is None
    folder = export_run(Place(run_dir), Place(run_dir / "export"))
    newest = find_latest(Place(run_dir / "checkpoints"))
    assert newest is not None
    assert read_export_record(folder) == ExportRecord("huggingface", "run", 3, newest.tensors_sha256)
    loaded = DomextForMaskedLM.from_pretrained(folder).eval()
    assert torch.equal(score(run, loaded), score(run))
    assert open_model(str(run_dir)).load().step == 3 and open_model(str(folder)).load().step == 0
    assert metadata_load(Path(folder / "README.md"))["license"] == "mit"
    assert "| Text | `notes.txt,letters.txt` |" in (folder / "README.md").read_text()
    check_shared(Path(folder), tmp_path)


def test_a_run_in_a_bucket_is_exported_there(objects: str, base: Base, tmp_path: Path) -> None:
    there = Place(f"{BUCKET}/{tmp_path.name}")
    run_dir, run = make_run_of(base, tmp_path / "run")
    for name in Place(run_dir).list_files():
        (there / "run" / name).put((run_dir / name).read_bytes())
    for output in ([], ["--output", f"{there}/other"]):
        done = call_job("export_hf", "--run", f"{there}/run", *output)
        assert done.code == 0 and done.out == f"export: {output[1] if output else f'{there}/run/export'}\n", done.err
    assert list_exported(there / "run" / "export") == list_exported(there / "other")
    assert list_exported(there / "other") == list_exported(export_run(Place(run_dir), Place(tmp_path / "export")))
    loaded = DomextForMaskedLM.from_pretrained((there / "other").local()).eval()
    assert torch.equal(score(run, loaded), score(run))
    done = call_job("export_hf", "--run", f"{there}/other", "--push", "org/name")
    assert done.code == 0 and "bytes  model.safetensors" in done.out and "README.md begins:\n  ---" in done.out
    done = call_job("export_hf", "--run", f"{there}/none")
    assert done.code == 2 and f"{there}/none" in done.err and done.err.count("\n") == 1, done.err


def test_what_grows_from_the_shipped_base_says_its_terms(tmp_path: Path) -> None:
    """All text that it was made from is free of terms, so its weights are the project's; every card says so."""
    shipped = load_base("general-mini")
    terms = read_terms(shipped.folder)
    assert (terms.license, terms.name) == ("apache-2.0", "")
    assert "all training text of this base is free of terms." in terms.text
    run = replace(make_rebuilt(shipped, PretrainConfig(method=FULL)), config=PretrainConfig(method=FULL))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(build_card(run, {}))
        header = metadata_load(tmp_path / name / "README.md")
        assert header["license"] == terms.license and "license_name" not in header
        assert (tmp_path / name / "README.md").read_text().count("training text of this base is free of terms.") == 1
        assert read_terms(tmp_path / name) == terms
        moved = replace(shipped, read=replace(shipped.files, folder=tmp_path / name))
        run = replace(run, spec=replace(run.spec, base=moved))
    assert read_terms(tmp_path) == Terms()
    readme = (REPOSITORY / "README.md").read_text()
    assert "base that ships ([general-mini]" in readme and "are under [Apache-2.0](LICENSE)" in readme


def test_the_card_carries_the_figures_of_this_checkpoint_only(base: Base, tmp_path: Path) -> None:
    run_dir, _ = make_run_of(base, tmp_path / "run")
    pairs = {"mlm_loss": (4.8, 3.4), "mlm_accuracy": (0.29, 0.42), "bits_per_character": (3.21, 2.5)}
    pairs["word_bits_per_character"] = (3.01, 2.25)
    summary = {
        "domain": {name: {"before": before, "after": after} for name, (before, after) in pairs.items()},
        "general": {"mlm_accuracy": {"before": None, "after": None}},
        "train": {"steps": 3, "tokens": 12_288},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    card = (export_run(Place(run_dir), Place(tmp_path / "export")) / "README.md").read_text()
    assert "| 4.800 | 3.400 |" in card
    assert "| 29.0% | 42.0% |" in card
    assert "word bits per character, comparable between vocabularies) | 3.010 | 2.250 |" in card
    assert "General sentences" not in card, "nothing was measured"
    routed = {"domain": {name: before for name, (before, _) in pairs.items()}, "general": {"mlm_accuracy": None}}
    (run_dir / "summary.json").write_text(json.dumps({**summary, "routed": routed}))
    card = (export_run(Place(run_dir), Place(tmp_path / "export")) / "README.md").read_text()
    assert "| before | after | with its router |" in card and "| 4.800 | 3.400 | 4.800 |" in card
    (run_dir / "summary.json").write_text(json.dumps(summary))
    summary["train"]["steps"] = 2
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert "4.800" not in (export_run(Place(run_dir), Place(tmp_path / "export")) / "README.md").read_text()


def test_a_run_from_random_weights_is_exported(base: Base, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}
    usual = PretrainConfig()
    config = PretrainConfig(
        base="none",
        method=FULL,
        vocab=replace(usual.vocab, size=64),
        shape=replace(usual.shape, max_position_embeddings=32, **shape),
        train=replace(usual.train, seq_length=32),
    )
    run = make_rebuilt(None, config, tokenizer_folder=base.folder, pad_token_id=0)
    run_dir = make_run(tmp_path / "run", config, run.model, None)
    run.tokenizer.save_pretrained(run_dir / "tokenizer")
    folder = export_run(Place(run_dir), Place(tmp_path / "export"))
    assert torch.equal(score(run, DomextForMaskedLM.from_pretrained(folder).eval()), score(run))
    assert "base_model" not in metadata_load(Path(folder / "README.md"))


def test_a_model_without_extensions_is_a_plain_checkpoint_in_fp16_too(
    tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    ids = torch.randint(10, 200, (2, 9))
    for source in (tiny_base_folder, tiny_roberta_folder):
        base, folder = load_base(str(source)), tmp_path / source.name
        run = make_rebuilt(base, PretrainConfig(method=FULL))
        export_model(run, Place(folder), torch.float16)
        assert not list(folder.glob("*.py"))
        loaded, info = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert loaded.config.model_type == base.folder.name.removeprefix("tiny-")
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            assert (loaded.eval()(ids).logits - run.model(ids).logits).abs().max() < 0.05
        assert load_base(str(folder)).tensors.keys() == base.tensors.keys()


def test_a_plain_model_with_both_heads_is_transformers_own(tiny_base_folder: Path, tmp_path: Path) -> None:
    base = load_base(str(tiny_base_folder), next_sentence=True)
    run, folder = make_rebuilt(base, PretrainConfig(method=FULL), next_sentence=True), tmp_path / "export"
    export_model(run, Place(folder))
    loaded, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(10, 200, (2, 9))
    with torch.no_grad():
        found, expected = loaded.eval()(ids), run.model(ids)
    torch.testing.assert_close(found.prediction_logits, expected.prediction_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5, rtol=0)


def test_a_checkpoint_of_another_base_or_shape_is_refused(base: Base, tmp_path: Path) -> None:
    run_dir, _ = make_run_of(base, tmp_path / "run", recorded=replace(base, sha256="0" * 64))
    with pytest.raises(RunError, match="000000000000"):
        export_run(Place(run_dir), Place(tmp_path / "export"))
    assert not (tmp_path / "export").exists()
    run_dir, _ = make_run_of(base, tmp_path / "wider")
    wider = yaml.safe_load((run_dir / "config.yaml").read_text())
    wider["method"]["ffn_units"] = 9
    (run_dir / "config.yaml").write_text(yaml.safe_dump(wider))
    with pytest.raises(RunError, match="does not fit"):
        export_run(Place(run_dir), Place(tmp_path / "export"))


def test_the_job_says_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(dump_yaml(CONFIG))
    for arguments, reason in (
        ([], "--run is ''"),
        (["--run", str(tmp_path / "run")], "does not exist"),
        (["--run", str(empty)], "no usable checkpoint"),
    ):
        done = call_job("export_hf", *arguments)
        assert done.code == 2 and done.err.startswith("error: ") and reason in done.err
        assert done.err.count("\n") == 1, done.err


def test_a_card_cites_the_papers_of_what_a_model_has(base: Base) -> None:
    for sizes, named, cited in (
        ({"heads": 1, "ffn_units": 4}, " (AF Adapter)", ["yan2022afadapter"]),
        ({"ffn_units": 4, "bottleneck_size": 4}, " (FL-Tuning, Houlsby)", ["liu2022fltuning", "houlsby2019adapters"]),
        ({"word_rows": 4}, "", []),
        ({"module_hidden_size": 8, "module_ffn_size": 8}, " (exBERT)", ["tai2020exbert"]),
        ({"lora_rank": 2}, "", ["hu2022lora"]),
    ):
        method = MethodConfig(**{"heads": 0, "ffn_units": 0, **sizes})
        run = make_rebuilt(base, PretrainConfig(method=method))
        card = build_card(run, {})
        assert named in card
        assert re.findall(r"^@\w+\{(\w+),$", card, re.MULTILINE) == [*cited, "devlin2019bert"]
    adapters = {
        "both": AdapterConfig(heads=1, ffn_units=4),
        "units": AdapterConfig(ffn_units=4),
        "words": AdapterConfig(word_rows=4),
    }
    assert [paper.name for paper in Units().find_papers(DomextConfig(adapters=adapters))] == ["AF Adapter", "FL-Tuning"]


def test_the_hub_reads_a_card(base: Base, tmp_path: Path) -> None:
    config = replace(CONFIG, base="someone/tiny-bert", corpus="hf://someone/notes@v2,texts/*.txt")
    measured = {"mlm_loss": {"before": 5.0, "after": 4.25}, "mlm_accuracy": {"before": 0.1, "after": 0.2}}
    summary = {
        "domain": {**measured, "bits_per_character": {"before": 3.0, "after": 2.5}},
        "general": {"mlm_accuracy": {"before": None, "after": None}},
        "train": {"tokens": 1000},
    }
    run = replace(make_rebuilt(base, name="notes-af"), config=config)
    (tmp_path / "README.md").write_text(build_card(run, summary))
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/tiny-bert", "finetune")
    assert card.data.datasets == ["someone/notes"] and card.data.license == "mit"
    found = [(result.dataset_type, result.metric_type, result.metric_value) for result in card.data.eval_results]
    assert found == [("domain", "loss", 4.25), ("domain", "accuracy", 0.2)]
    for shipped in ("general-mini", str(tmp_path)):
        assert "base_model" not in build_card(replace(run, config=replace(config, base=shipped)), summary)
