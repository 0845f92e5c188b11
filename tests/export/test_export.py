"""An export loads with torch and transformers only, gives the library's logits, and is never half there."""

from __future__ import annotations

import json
import re
import runpy
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
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertTokenizer,
    PreTrainedTokenizerBase,
)

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig, VocabConfig
from domext_ray.downstream.start.model import load_start_model
from domext_ray.errors import RunError
from domext_ray.export.card import Terms, build_card, read_terms
from domext_ray.export.folder import ExportRecord, list_exported, new_export, read_export_record
from domext_ray.export.model_folder import CODE_FILES, export_model, export_run
from domext_ray.model.base import Base, load_base
from domext_ray.model.build import build_model
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.options.build import dump_yaml
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.rebuild import RebuiltRun
from domext_ray.vocabulary.extension import base_token_ids, read_base_vocabulary
from domext_ray.vocabulary.learn import import_words
from domext_ray.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer

WORDS = "the a house river garden bread was is very old new warm cold ##s ##ed . ,".split()

LOAD_ALONE = (
    WITHOUT_PROJECT
    + """
import json
import sys
import torch
import transformers as tf

folder = sys.argv[1]
torch.set_num_threads(1)
tokenizer = tf.AutoTokenizer.from_pretrained(folder)
batch = tokenizer(["the old house was warm .", "a river"], padding=True, return_tensors="pt")
model = tf.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(**batch).logits
    shapes = {}
    for name in (
        "AutoModel",
        "AutoModelForTokenClassification",
        "AutoModelForSequenceClassification",
        "AutoModelForQuestionAnswering",
    ):
        other = getattr(tf, name).from_pretrained(folder, trust_remote_code=True).eval()
        shapes[name] = list(other(**batch)[0].shape)
assert "domext_ray" not in sys.modules
print(json.dumps({"ids": batch["input_ids"].tolist(), "logits": logits.tolist(), "shapes": shapes}))
"""
)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # For the processes that tests start: transformers copies an export's code below HF_HOME before it runs it.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={word: i for i, word in enumerate([*specials, *WORDS])}, model_max_length=32)


@pytest.fixture
def base(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Base:
    folder = tmp_path / "tiny-bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A tiny BERT\n")
    return load_base(str(folder))


FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
CONFIG = PretrainConfig(method=MethodConfig(adapter="garden", heads=1, ffn_units=8))


def make_model(base: Base | None, config: PretrainConfig) -> DomextForMaskedLM:
    """A model whose extensions have moved away from their zero start."""
    model = build_model(
        base, config.shape, config.method, vocab_size=5 + len(WORDS), pad_token_id=0, dropout=0.1, seed=config.seed
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return model.eval()


def make_rebuilt(base: Base, model: DomextForMaskedLM, tokenizer: Any, name: str = "tiny") -> RebuiltRun:
    return as_rebuilt(model, base, tokenizer, replace(CONFIG, base=str(base.folder)), name)


def load_alone(folder: Path, cwd: Path) -> dict:
    """Load an export where this project and what it needs cannot be imported; -I keeps the working folder out."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_ALONE, str(folder)],
        cwd=cwd,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "custom code" not in done.stdout + done.stderr and "model of type" not in done.stderr, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def check_shared(folder: Path, tmp_path: Path) -> None:
    """No file that is passed on says where things lie on this machine."""
    for name, content in read_tree(folder).items():
        assert not [place for place in (tmp_path, Path.home()) if f"{place}/".encode() in content], name


def score(model: DomextForMaskedLM, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    batch = tokenizer(["the old house was warm .", "a river"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits


def test_an_export_loads_alone_and_gives_equal_logits(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = make_model(base, CONFIG)
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, model, tokenizer), folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    loaded = load_alone(folder, elsewhere)
    with pytest.raises(KeyError, match="give trust_remote_code=True"):
        AutoModelForMaskedLM.from_pretrained(folder)
    torch.testing.assert_close(torch.tensor(loaded["logits"]), score(model, tokenizer), atol=1e-5, rtol=0)
    assert loaded["shapes"] == {
        "AutoModel": [2, 8, 16],
        "AutoModelForTokenClassification": [2, 8, 2],
        "AutoModelForSequenceClassification": [2, 2],
        "AutoModelForQuestionAnswering": [2, 8],
    }


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_exports_tokenizer_and_model_load_without_a_word(
    kind: str,
    tiny_base_folder: Path,
    tiny_roberta_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_base_folder if kind == "bert" else tiny_roberta_folder
    base, tokenizer = load_base(str(source)), load_tokenizer(source)
    model = build_model(base, CONFIG.shape, CONFIG.method, vocab_size=0, dropout=0.1, seed=0).eval()
    capfd.readouterr()
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, model, tokenizer), folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    again = AutoTokenizer.from_pretrained(folder)
    assert type(again) is type(tokenizer) and fingerprint_tokenizer(again) == fingerprint_tokenizer(tokenizer)
    start = load_start_model(str(folder))
    assert (start.kind, start.config.hidden_act, start.config.model_type) == ("export", "gelu", "domext")
    assert capfd.readouterr() == ("", "")


def test_an_export_carries_new_words_beside_byte_level_bpe(tiny_roberta_folder: Path, tmp_path: Path) -> None:
    base = load_base(str(tiny_roberta_folder))
    (tmp_path / "words.txt").write_text("gardenhouse\n##house\n")
    number = base.config.vocab_size
    known = read_base_vocabulary("tiny", base.tokenizer_folder, number)
    made = import_words(VocabConfig(words=str(tmp_path / "words.txt")), known, tmp_path / "vocab")
    tokenizer, pieces = load_tokenizer(made.folder), base_token_ids(load_tokenizer(base.tokenizer_folder), made.words)
    model = build_model(
        base, CONFIG.shape, CONFIG.method, vocab_size=number, new_words=pieces, dropout=0.1, seed=0
    ).eval()
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, model, tokenizer), folder)
    (tmp_path / "elsewhere").mkdir()
    loaded = load_alone(folder, tmp_path / "elsewhere")
    torch.testing.assert_close(torch.tensor(loaded["logits"]), score(model, tokenizer), atol=1e-5, rtol=0)
    assert len(loaded["logits"][0][0]) == number + 2
    again = AutoTokenizer.from_pretrained(folder)
    assert fingerprint_tokenizer(again) == fingerprint_tokenizer(tokenizer)
    assert again("a gardenhouse", add_special_tokens=False).input_ids[-1] == number


def test_an_export_has_every_file_and_says_what_it_is(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = make_model(base, CONFIG)
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, model, tokenizer), folder)
    assert {each.name for each in folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        *CODE_FILES,
        "tokenizer.json",
        "README.md",
        "modules.json",
        "sentence_bert_config.json",
    }
    assert not list(folder.glob("*.bin"))
    modes = {each.stat().st_mode for each in folder.rglob("*") if each.is_file()}
    assert len(modes) == 1, "every file is readable by the same people"
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata()["format"] == "pt"
    assert sorted(json.loads((folder / "config.json").read_text())["auto_map"]) == [
        "AutoConfig",
        "AutoModel",
        "AutoModelForMaskedLM",
        "AutoModelForMultipleChoice",
        "AutoModelForPreTraining",
        "AutoModelForQuestionAnswering",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
    ]
    own = REPOSITORY / "domext_ray" / "model" / "domext" / "modeling_domext.py"
    assert (folder / "modeling_domext.py").read_bytes() == own.read_bytes()
    header = metadata_load(folder / "README.md")
    assert "base_model" not in header, "a folder's name is no model of the hub"
    assert (header["license"], header["library_name"], header["pipeline_tag"]) == ("mit", "transformers", "fill-mask")
    card = (folder / "README.md").read_text()
    assert base.sha256 in card and "read its `*_domext.py` files first" in card
    assert sorted(each.name for each in folder.glob("*.py")) == sorted(each.name for each in folder.glob("*_domext.py"))
    assert f"{sum(each.numel() for each in model.parameters()):,}" in card
    assert str(tmp_path) not in card, "the card tells where things lie on this machine"
    reloaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert fingerprint_tokenizer(reloaded) == fingerprint_tokenizer(tokenizer)


def test_exporting_leaves_the_model_as_it_was(base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = make_model(base, CONFIG)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    export_model(make_rebuilt(base, model, tokenizer), tmp_path / "export")
    assert getattr(model.config, "auto_map", None) is None
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_an_export_is_replaced_only_by_a_complete_one(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(base, CONFIG)
    folder = tmp_path / "export"
    export_model(make_rebuilt(base, model, tokenizer, "first"), folder)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(RunError, match="No space left"):
            export_model(make_rebuilt(base, model, tokenizer, "second"), folder)
    assert "# first" in (folder / "README.md").read_text()
    export_model(make_rebuilt(base, model, tokenizer, "third"), folder)
    assert "# third" in (folder / "README.md").read_text()
    left = {each.name for each in tmp_path.iterdir()} - {"huggingface"}
    assert left == {"export", "tiny-bert"}, "a temporary folder was left behind"


@pytest.mark.parametrize("case", ["text", "base", "bert", "notes", ".git", "edited", "damaged"])
def test_what_is_not_the_exports_own_is_never_replaced(
    case: str, base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = make_model(base, CONFIG)
    run, folder = make_rebuilt(base, model, tokenizer), tmp_path / "export"
    if case == "text":
        folder.mkdir()
        (folder / "chapter.txt").write_text("years of work")
    elif case == "base":
        folder = base.folder
    elif case == "bert":
        shutil.copytree(base.folder, folder)
    else:
        export_model(run, folder)
    edits: dict[str, tuple[str, Callable[[Path], object]]] = {
        "base": ("what the export is made from", lambda _: None),
        "notes": ("notes.txt", lambda path: path.write_text("mine")),
        ".git": (".git/config", lambda path: (path.parent.mkdir(), path.write_text("[core]"))),
        "edited": ("README.md", lambda path: path.write_text("My own words.")),
        "damaged": ("domext_export.json", lambda path: path.write_text(path.read_text()[:90])),
    }
    name, edit = edits.get(case, ("no export of this project", lambda _: None))
    edit(folder / name)
    before = read_tree(folder)
    with pytest.raises(RunError, match=re.escape(name)):
        export_model(run, folder)
    assert read_tree(folder) == before
    assert not list(tmp_path.glob(".*")), "a temporary folder was left behind"


def test_a_base_that_was_exported_here_is_not_replaced_by_what_it_became(
    tiny_base_folder: Path, tmp_path: Path
) -> None:
    config = PretrainConfig(base=str(tiny_base_folder), method=FULL)
    source, tokenizer = load_base(str(tiny_base_folder)), AutoTokenizer.from_pretrained(tiny_base_folder)
    first = tmp_path / "first"
    export_model(as_rebuilt(make_model(source, config), source, tokenizer, config), first)
    before = read_tree(first)
    second = load_base(str(first))
    with pytest.raises(RunError, match="what the export is made from"):
        export_model(as_rebuilt(make_model(second, config), second, tokenizer, config), first)
    assert read_tree(first) == before


def test_an_export_says_which_checkpoint_it_is(base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = replace(CONFIG, base=str(base.folder))
    run_dir = make_run(tmp_path / "run", config, make_model(base, config), base, step=3)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    assert read_export_record(run_dir / "export") is None
    record = read_export_record(export_run(run_dir, run_dir / "export"))
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None and record == ExportRecord("huggingface", "run", 3, newest.tensors_sha256)


def test_an_export_that_was_killed_half_way_is_no_export_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "export", Place.put

    def export(version: str) -> None:
        with new_export(folder, ExportRecord("huggingface")) as temporary:
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
    assert read_export_record(folder) is None
    with pytest.raises(RunError, match="half an export"):
        list_exported(folder)
    export("3")
    assert list_exported(folder) == ["a", "b3", "domext_export.json"]
    assert sorted(each.name for each in folder.iterdir()) == ["a", "b3", "domext_export.json"]
    (folder / "mine").touch()
    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(RunError, match="mine: no part of the export"):
        export("2")


def test_a_run_is_exported_from_its_newest_checkpoint(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = replace(CONFIG, base=str(base.folder), corpus=f"{tmp_path}/clinic/notes.txt,~/letters.txt")
    model = make_model(base, config)
    run_dir = make_run(tmp_path / "run", config, make_model(base, replace(config, seed=7)), base, step=1)
    make_run(run_dir, config, model, base, step=3)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    folder = export_run(run_dir, run_dir / "export")
    loaded = DomextForMaskedLM.from_pretrained(folder).eval()
    assert torch.equal(score(loaded, tokenizer), score(model, tokenizer))
    assert metadata_load(folder / "README.md")["license"] == "mit"
    assert "| Text | `notes.txt,letters.txt` |" in (folder / "README.md").read_text()
    check_shared(folder, tmp_path)


def test_a_run_in_a_bucket_is_exported_there(
    objects: str, base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config, there = replace(CONFIG, base=str(base.folder)), Place(f"{BUCKET}/{tmp_path.name}")
    model = make_model(base, config)
    run_dir = make_run(tmp_path / "run", config, model, base, step=3)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    for name in Place(run_dir).list_files():
        (there / "run" / name).put((run_dir / name).read_bytes())
    for output in ([], ["--output", f"{there}/other"]):
        done = call_job("export_hf", "--run", f"{there}/run", *output)
        assert done.code == 0 and done.out == f"export: {output[1] if output else f'{there}/run/export'}\n", done.err
    assert list_exported(there / "run" / "export") == list_exported(there / "other")
    assert list_exported(there / "other") == list_exported(export_run(run_dir, tmp_path / "export"))
    loaded = DomextForMaskedLM.from_pretrained((there / "other").local()).eval()
    assert torch.equal(score(loaded, tokenizer), score(model, tokenizer))
    done = call_job("export_hf", "--run", f"{there}/other", "--push", "org/name")
    assert done.code == 0 and "bytes  model.safetensors" in done.out and "README.md begins:\n  ---" in done.out
    done = call_job("export_hf", "--run", f"{there}/none")
    assert done.code == 2 and f"{there}/none" in done.err and done.err.count("\n") == 1, done.err


def test_what_grows_from_the_shipped_base_says_its_terms(tmp_path: Path) -> None:
    """All text that it was made from is free of terms, so its weights are the project's; every card says so."""
    shipped = load_base("general-mini")
    terms = read_terms(shipped.folder)
    assert (terms.license, terms.name) == ("apache-2.0", "")
    assert "all text that they come from is free of terms." in terms.text
    config = PretrainConfig(method=FULL)
    model = make_model(shipped, config)
    run = as_rebuilt(model, shipped, load_tokenizer(shipped.folder), config)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(build_card(run, {}))
        header = metadata_load(tmp_path / name / "README.md")
        assert header["license"] == terms.license and "license_name" not in header
        assert (tmp_path / name / "README.md").read_text().count("they come from is free of terms.") == 1
        assert read_terms(tmp_path / name) == terms
        run = replace(run, base=replace(shipped, folder=tmp_path / name))
    assert read_terms(tmp_path) == Terms()
    readme = (REPOSITORY / "README.md").read_text()
    assert "under Apache-2.0, too" in readme[readme.index("The base that ships, `domext_ray") :]


def test_the_card_carries_the_figures_of_this_checkpoint_only(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = replace(CONFIG, base=str(base.folder))
    run_dir = make_run(tmp_path / "run", config, make_model(base, config), base)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    summary = {
        "domain": {
            "mlm_loss": {"before": 4.8, "after": 3.4},
            "mlm_accuracy": {"before": 0.29, "after": 0.42},
            "bits_per_character": {"before": 3.21, "after": 2.5},
            "word_bits_per_character": {"before": 3.01, "after": 2.25},
        },
        "general": {"mlm_accuracy": {"before": None, "after": None}},
        "train": {"steps": 3, "tokens": 12_288},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    card = (export_run(run_dir, tmp_path / "export") / "README.md").read_text()
    assert "| 4.800 | 3.400 |" in card
    assert "| 29.0% | 42.0% |" in card
    assert "word bits per character, comparable between vocabularies) | 3.010 | 2.250 |" in card
    assert "General sentences" not in card, "nothing was measured"
    summary["train"]["steps"] = 2
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert "4.800" not in (export_run(run_dir, tmp_path / "export") / "README.md").read_text()


def test_a_run_from_random_weights_is_exported(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = PretrainConfig(
        base="none",
        method=FULL,
        vocab=replace(PretrainConfig().vocab, size=64),
        shape=replace(
            PretrainConfig().shape,
            num_hidden_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=32,
        ),
        train=replace(PretrainConfig().train, seq_length=32),
    )
    model = make_model(None, config)
    run_dir = make_run(tmp_path / "run", config, model, None)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    folder = export_run(run_dir, tmp_path / "export")
    assert torch.equal(score(DomextForMaskedLM.from_pretrained(folder).eval(), tokenizer), score(model, tokenizer))
    assert "base_model" not in metadata_load(folder / "README.md")


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_without_extensions_is_a_plain_checkpoint_again(
    kind: str, dtype: torch.dtype, tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    source = tiny_base_folder if kind == "bert" else tiny_roberta_folder
    config = PretrainConfig(base=str(source), method=FULL)
    base, folder = load_base(str(source)), tmp_path / "export"
    model = make_model(base, config).eval()
    export_model(as_rebuilt(model, base, AutoTokenizer.from_pretrained(source), config), folder, dtype)
    assert not list(folder.glob("*.py"))
    loaded, info = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert loaded.config.model_type == kind and not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(10, 200, (2, 9))
    with torch.no_grad():
        difference = (loaded.eval()(ids).logits - model(ids).logits).abs().max()
    assert difference < (1e-5 if dtype == torch.float32 else 0.05)
    assert load_base(str(folder)).tensors.keys() == load_base(str(source)).tensors.keys()


def test_a_plain_model_with_both_heads_is_transformers_own(tiny_base_folder: Path, tmp_path: Path) -> None:
    base = load_base(str(tiny_base_folder), next_sentence=True)
    size = base.config.vocab_size
    model = build_model(base, CONFIG.shape, FULL, vocab_size=size, next_sentence=True, dropout=0.0, seed=3).eval()
    config = PretrainConfig(base=str(tiny_base_folder), method=FULL)
    folder = tmp_path / "export"
    export_model(as_rebuilt(model, base, AutoTokenizer.from_pretrained(tiny_base_folder), config), folder)
    loaded, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(10, 200, (2, 9))
    with torch.no_grad():
        found, expected = loaded.eval()(ids), model(ids)
    torch.testing.assert_close(found.prediction_logits, expected.prediction_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5, rtol=0)


def test_another_base_than_the_checkpoints_is_refused(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = replace(CONFIG, base=str(base.folder))
    run_dir = make_run(tmp_path / "run", config, make_model(base, config), replace(base, sha256="0" * 64))
    tokenizer.save_pretrained(run_dir / "tokenizer")
    with pytest.raises(RunError, match="000000000000"):
        export_run(run_dir, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_of_another_shape_is_refused(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = replace(CONFIG, base=str(base.folder))
    run_dir = make_run(tmp_path / "run", config, make_model(base, config), base)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    wider = yaml.safe_load((run_dir / "config.yaml").read_text())
    wider["method"]["ffn_units"] = 9
    (run_dir / "config.yaml").write_text(yaml.safe_dump(wider))
    with pytest.raises(RunError, match="does not fit"):
        export_run(run_dir, tmp_path / "export")


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no folder", "does not exist"), ("no checkpoint", "no usable checkpoint"), ("no option", "--run is ''")],
)
def test_the_job_says_in_one_sentence_what_is_wrong(
    case: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [] if case == "no option" else ["--run", str(tmp_path / "run")]
    if case == "no checkpoint":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text(dump_yaml(CONFIG))
    monkeypatch.setattr(sys, "argv", ["export_hf.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(REPOSITORY / "jobs" / "export_hf.py"), run_name="__main__")
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert reason in message
    assert len(message.strip().splitlines()) == 1


def test_the_job_exports_into_the_run(
    base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, base=str(base.folder))
    run_dir = make_run(tmp_path / "run", config, make_model(base, config), base)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    monkeypatch.setattr(sys, "argv", ["export_hf.py", "--run", str(run_dir)])
    runpy.run_path(str(REPOSITORY / "jobs" / "export_hf.py"), run_name="__main__")
    assert (run_dir / "export" / "model.safetensors").exists()


def test_the_hub_reads_a_card(base: Base, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = make_model(base, CONFIG)
    config = replace(CONFIG, base="someone/tiny-bert", corpus="hf://someone/notes@v2,texts/*.txt")
    measured = {"mlm_loss": {"before": 5.0, "after": 4.25}, "mlm_accuracy": {"before": 0.1, "after": 0.2}}
    summary = {
        "domain": {**measured, "bits_per_character": {"before": 3.0, "after": 2.5}},
        "general": {"mlm_accuracy": {"before": None, "after": None}},
        "train": {"tokens": 1000},
    }
    run = as_rebuilt(model, base, tokenizer, config, "notes-af")
    (tmp_path / "README.md").write_text(build_card(run, summary))
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/tiny-bert", "finetune")
    assert card.data.datasets == ["someone/notes"] and card.data.license == "mit"
    found = [(each.dataset_type, each.metric_type, each.metric_value) for each in card.data.eval_results]
    assert found == [("domain", "loss", 4.25), ("domain", "accuracy", 0.2)]
    for shipped in ("general-mini", str(tmp_path)):
        assert "base_model" not in build_card(replace(run, config=replace(config, base=shipped)), summary)
