"""A bank grows without touching what it holds, gives every adapter's own logits back, and refuses what does not fit."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import make_run as write_run
from conftest import SHAPE, make_random_model
from finetuned_models import BOTTLENECK as BESIDE
from finetuned_models import FULL as WHOLE
from finetuned_models import fit
from given_options import parse_config
from job_calls import call_job
from object_store import BUCKET
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel

from domext_ray.commands.bank import find_base, run_bank
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.jobs import BankConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import ObjectiveConfig, PretrainConfig
from domext_ray.config.shared import Pooling
from domext_ray.errors import BaseModelError, ConfigError, RunError, StorageError
from domext_ray.families.task import TaskOptions
from domext_ray.families.task_description import TaskDescription, describe_task
from domext_ray.finetuning.export import export_stages
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.configuration_domext import DomextConfig, complete_adapter
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel
from domext_ray.model.spec import ModelSpec
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import ARCHITECTURES, MASKED_LM, SEQUENCES, TOKENS
from domext_ray.models.mixed_adapters import serve_adapters
from domext_ray.models.source import open_model
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

BOTTLENECK = {"bottleneck_size": 5}
EVERYTHING = {"heads": 1, "ffn_units": 3, "bottleneck_size": 4, "layer_norms": False, "first_layer": 1}
VARIANT = {**BOTTLENECK, "bottleneck_parallel": True, "bottleneck_layer_norm": True, "bottleneck_activation": "relu"}
SHIFTS = {**BOTTLENECK, "word_rows": 30, "word_head": True}
TASK = TaskDescription("ner", "made", ("Drug",), "f1.micro", TaskOptions(32, 8))
BASES = ("tiny_base_folder", "tiny_roberta_folder", "headless_folder")


@pytest.fixture(scope="session")
def headless_folder(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BertModel: a pooler, and no masked-LM head."""
    folder = tmp_path_factory.mktemp("bases") / "headless"
    shutil.copytree(tiny_base_folder, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    vocab_size = load_base(str(tiny_base_folder)).config.vocab_size
    make_random_model(BertModel, BertConfig(vocab_size=vocab_size, **SHAPE), seed=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


@pytest.fixture
def bank(tiny_base_folder: Path, tmp_path: Path) -> AdapterBank:
    return AdapterBank.create(tmp_path / "bank", str(tiny_base_folder))


def test_places_may_be_texts(tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = AdapterBank.create("~/own", str(tiny_base_folder))
    assert made.folder == AdapterBank.open("~/own").folder == AdapterBank.open(str(tmp_path / "own")).folder
    with pytest.raises(RunError, match="no run directory"):
        made.add_run("law", str(tmp_path / "own"))


def make_model(
    base: Base, architecture: str = MASKED_LM, seed: int = 1, adapter: str = "own", sizes: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A model whose adapter and head are far from their start, and whose base is as it was."""
    config: DomextConfig = copy.deepcopy(base.config)
    config.adapters = {adapter: complete_adapter(adapter, sizes or BOTTLENECK, config.num_hidden_layers)}
    if architecture != MASKED_LM:
        labels = [f"label-{seed}-{number}" for number in range(2 + seed % 3)]
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    generator = torch.Generator().manual_seed(seed)
    model = ARCHITECTURES[architecture](config)
    model.load_state_dict(base.tensors, strict=False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name not in base.tensors:
                param.add_(0.3 * torch.randn(param.shape, generator=generator))
        for name, rows in model.named_buffers():
            if name.endswith(".rows"):
                rows.copy_(5 * torch.arange(len(rows)) + seed)  # the words that it shifts
    return model.eval()


def make_run(
    base: Base,
    run_dir: Path,
    method: MethodConfig,
    change: Callable[[DomextForMaskedLM], object] | None = None,
    objective: ObjectiveConfig | None = None,
) -> DomextForMaskedLM:
    """Write a run's directory as a training job leaves it, and return its model."""
    config = PretrainConfig(base=str(base.folder), method=method, objective=objective or ObjectiveConfig())
    model = ModelSpec(base, method, dropout=0.1).build().eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    changed = {} if change is None else {name: dict(model.named_parameters())[name] for name in [change(model)]}
    write_run(run_dir, config, model, base, step=7, changed=changed)
    load_tokenizer(base.folder).save_pretrained(run_dir / "tokenizer")
    return model


def make_batch(base: Base, num_rows: int, padding: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, 200, (num_rows, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(num_rows if padding else 0):
        mask[row, 9 - row % 5 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, base.config.pad_token_id), "attention_mask": mask}


def score(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def find_tensors(bank: AdapterBank, name: str) -> Path:
    (path,) = Path(bank.folder / "adapters" / name).glob("adapter-*.safetensors")
    return path


def read_state(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of change of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }


def test_adding_a_task_touches_no_other_file(bank: AdapterBank, base: Base) -> None:
    seen: dict[str, tuple[str, int]] = read_state(Path(bank.folder))
    assert seen.keys() == {"bank.json", ".base_folder"}
    for seed, (name, architecture) in enumerate(zip(("law", "art", "zoo"), ARCHITECTURES, strict=True)):
        bank.add(name, make_model(base, architecture, seed), "own")
        found = read_state(Path(bank.folder))
        tensors = f"adapters/{name}/adapter-{bank.describe(name).sha256[:16]}.safetensors"
        assert found.keys() - seen.keys() == {f"adapters/{name}/adapter.json", tensors}
        assert {path: found[path] for path in seen} == seen
        seen = found
    assert bank.names() == AdapterBank.open(bank.folder).names() == ["art", "law", "zoo"]
    assert len({path.stat().st_mode for path in Path(bank.folder).rglob("*") if path.is_file()}) == 1
    bank.remove("law")
    assert read_state(Path(bank.folder)) == {path: state for path, state in seen.items() if "/law/" not in path}
    assert bank.names() == ["art", "zoo"] and not bank.verify()


@pytest.mark.parametrize("base_name", BASES)
def test_a_loaded_adapter_is_the_model_that_was_added(
    base_name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = load_base(str(request.getfixturevalue(base_name)))
    bank = AdapterBank.create(tmp_path / "bank", base.id)
    cases = [(MASKED_LM, SHIFTS), *((kind, EVERYTHING) for kind in ARCHITECTURES)]
    if base_name == BASES[0]:
        cases += [*product(ARCHITECTURES, (BOTTLENECK, VARIANT)), (TOKENS, SHIFTS), (SEQUENCES, SHIFTS)]
        cases.append((MASKED_LM, {**SHIFTS, "scale": 0.5}))
    batch = make_batch(base, 4)
    for i, (architecture, sizes) in enumerate(cases):
        model = make_model(base, architecture, sizes=sizes)
        entry = bank.add(f"law{i}", model, "own", {"paper": "1902.00751"})
        before = torch.get_rng_state()
        loaded = AdapterBank.open(bank.folder).load(f"law{i}")
        assert torch.equal(torch.get_rng_state(), before), "loading draws nothing from the caller's generator"
        assert torch.equal(score(loaded, batch), score(model, batch)), (architecture, sizes)
        assert type(loaded) is type(model) and not loaded.training
        assert loaded.config.id2label == model.config.id2label
        assert bank.describe(f"law{i}") == entry and entry.origin == {"paper": "1902.00751"}
        own = [param.numel() for name, param in model.named_parameters() if name not in base.tensors]
        assert entry.num_parameters == sum(own) and entry.num_bytes < 4 * sum(own) + 20_000


def test_files_do_not_name_the_adapter(bank: AdapterBank, base: Base) -> None:
    model = make_model(base, SEQUENCES)
    bank.add("law", model, "own")
    tensors = load_file(find_tensors(bank, "law"))
    assert {"bert.encoder.layer.0.attention.output.adapters.down.weight", "pooler.dense.weight"} <= tensors.keys()
    assert {name for name in tensors if name.startswith("classifier.")}
    assert not [name for name in tensors if "own" in name.split(".") or "law" in name]
    os.rename(bank.folder / "adapters" / "law", bank.folder / "adapters" / "contracts")
    batch = make_batch(base, 2)
    assert torch.equal(score(bank.load("contracts"), batch), score(model, batch))


def test_adapters_come_switch_and_go_at_run_time(bank: AdapterBank, base: Base) -> None:
    sizes = {"law": BOTTLENECK, "art": BOTTLENECK, "some": SHIFTS, "all": {"word_rows": base.config.vocab_size}}
    models = {name: make_model(base, seed=seed, sizes=own) for seed, (name, own) in enumerate(sizes.items())}
    for name, model in models.items():
        bank.add(name, model, "own")
    served, batch = make_plain(base), make_batch(base, 3)
    expected = score(served, batch)
    for name, model in models.items():
        bank.attach(served, name)
        assert torch.equal(score(served, batch), score(model, batch)), name
        assert not torch.allclose(score(model, batch), expected)
        served.detach_adapter(name)
        assert torch.equal(score(served, batch), expected), name
    for name in ("law", "art"):
        bank.attach(served, name)
    for name in ("art", "law", "art"):
        served.bert.set_active_adapters([name])
        assert torch.equal(score(served, batch), score(models[name], batch))
    with pytest.raises(RunError, match="has an adapter 'art' already"):
        bank.attach(served, "art")
    served.bert.set_active_adapters([])
    assert torch.equal(score(served, batch), expected)
    served.bert.detach_adapter("law")
    served.bert.detach_adapter("art")
    assert served.state_dict().keys() == make_plain(base).state_dict().keys()


def test_shifts_of_words_are_of_the_encoder_and_of_scores(bank: AdapterBank, base: Base) -> None:
    words = make_model(base, sizes=SHIFTS)
    bank.add("some", words, "own")
    tokens, served, batch = make_model(base, TOKENS, sizes=SHIFTS), make_plain(base), make_batch(base, 3)
    bank.add("tags", tokens, "own")
    expected = score(served, batch)
    bank.attach(served, "tags")
    assert not torch.allclose(score(served, batch), expected), "words that a tagger shifts are scored so, too"
    tokens.bert.detach_adapter("own")
    bank.attach(tokens, "some")  # a head for tokens has no scores of words
    with torch.no_grad():
        states = [model.bert(**batch).last_hidden_state for model in (tokens, words)]
    assert torch.equal(*states)


def make_plain(base: Base) -> PreTrainedModel:
    model = make_model(base)
    model.bert.detach_adapter("own")
    return model


def test_attaching_follows_dtype_and_reaches_bare_encoders(bank: AdapterBank, base: Base) -> None:
    bank.add("law", make_model(base, sizes=EVERYTHING), "own")
    rounded = make_plain(base).to(torch.bfloat16)
    bank.attach(rounded, "law")
    assert {param.dtype for param in rounded.parameters()} == {torch.bfloat16}
    encoder = make_plain(base).bert
    bank.attach(encoder, "law")
    batch = make_batch(base, 2)
    with torch.no_grad():
        expected = bank.load("law").bert(**batch).last_hidden_state
        assert torch.equal(encoder(**batch).last_hidden_state, expected)


@pytest.mark.parametrize("base_name", BASES)
def test_a_mixed_batch_is_each_row_through_its_own_model(
    base_name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = load_base(str(request.getfixturevalue(base_name)))
    bank = AdapterBank.create(tmp_path / "bank", base.id)
    kinds = {"law": MASKED_LM, "art": TOKENS, "zoo": SEQUENCES, "sea": SEQUENCES, "sky": MASKED_LM, "dim": MASKED_LM}
    sizes, models = {"zoo": EVERYTHING, "sky": SHIFTS, "dim": {**SHIFTS, "scale": 0.5}}, {}
    for seed, (name, kind) in enumerate(kinds.items()):
        models[name] = make_model(base, kind, seed, sizes=sizes.get(name, BOTTLENECK))
        bank.add(name, models[name], "own")
    names = ["zoo", "law", "sea", "art", "zoo", "sky", "dim", "law", "art"]
    if base.has_mlm_head:
        names.insert(3, "__base__")
        models["__base__"] = make_plain(base)
    server, passes = serve_adapters(bank), []
    server.encoder.register_forward_hook(lambda *_: passes.append(1))
    for padding in (True, False):
        batch = make_batch(base, len(names), padding)
        if not padding:
            batch.pop("attention_mask")
        passes.clear()
        found = server(**batch, adapter_names=names)
        assert len(passes) == 1 and not found[0].requires_grad
        for row, name in enumerate(names):
            alone = score(models[name], {key: tensor[row : row + 1] for key, tensor in batch.items()})[0]
            torch.testing.assert_close(found[row], alone, atol=1e-5, rtol=0)
        assert found[0].shape == (4,) and found[1].shape[-1] == base.config.vocab_size
        assert found[names.index("art")].shape == (9, 3)


def test_a_server_changes_while_it_serves(bank: AdapterBank, base: Base) -> None:
    models = {name: make_model(base, SEQUENCES, seed) for seed, name in enumerate(("law", "art"))}
    for name, model in models.items():
        bank.add(name, model, "own")
    server, batch = serve_adapters(bank, ["law"]), make_batch(base, 4)
    expected = score(models["law"], batch)
    wrong: list[object] = []
    is_over = threading.Event()

    def ask() -> None:
        torch.set_num_threads(1)
        while not is_over.is_set():
            found = torch.stack(server(**batch, adapter_names=["law"] * 4))
            if not torch.allclose(found, expected, atol=1e-5):
                wrong.append(found)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(5):
            server.attach("art")
            torch.testing.assert_close(
                server(**batch, adapter_names=["art"] * 4), list(score(models["art"], batch)), atol=1e-5, rtol=0
            )
            server.drop("art")
    finally:
        is_over.set()
        asking.join()
    assert not wrong and server.names() == ["law"]
    for names, message in [
        (["law", "art", "law", "law"], "no adapter 'art' is served here; served are law"),
        (["law"], "1 names; the batch has 4"),
    ]:
        with pytest.raises(RunError, match=message):
            server(**batch, adapter_names=names)
    with pytest.raises(RunError, match="no adapter 'art'"):
        server.drop("art")
    with pytest.raises(RunError, match="has an adapter 'law' already"):
        server.attach("law")
    assert torch.allclose(torch.stack(server(**batch, adapter_names=["law"] * 4)), expected, atol=1e-5)
    bank.add("sky", make_model(base, sizes=SHIFTS), "own")
    server.attach("sky")
    states, scores = server.encode(**batch, adapter_names=["sky"] * 4), server(**batch, adapter_names=["sky"] * 4)
    server.drop("sky")
    assert all(torch.equal(logits, scores[row]) for row, logits in states.score().items()), "a batch keeps its adapters"
    server.drop("law")
    plain = torch.stack(server(**batch, adapter_names=["__base__"] * 4))
    assert torch.equal(plain, score(make_plain(base), batch)), "what was dropped has left nothing behind"


def test_a_base_without_a_head_serves_no_row_of_its_own(headless_folder: Path, tmp_path: Path) -> None:
    server = serve_adapters(AdapterBank.create(tmp_path / "bank", str(headless_folder)))
    with pytest.raises(RunError, match="no masked-LM head of its own"):
        server(torch.ones(1, 3, dtype=torch.long), adapter_names=["__base__"])


def test_a_name_that_is_taken_bad_or_unknown_is_refused(bank: AdapterBank, base: Base) -> None:
    bank.add("law", make_model(base), "own")
    seen, other = read_state(Path(bank.folder)), make_model(base, seed=2)
    for name in ("law", "", "a-b", "../law", "__base__", "keys", "forward"):
        with pytest.raises(RunError, match="has an adapter 'law' already" if name == "law" else "cannot be called"):
            bank.add(name, other, "own")
        assert read_state(Path(bank.folder)) == seen, name
    for call, name in product((bank.load, bank.remove, bank.describe), ("art", "", "..", "law/../law")):
        with pytest.raises(RunError, match="has no adapter .*; it has law"):
            call(name)


def change_base(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.bert.encoder.layer[1].output.LayerNorm.bias[3] += 1e-6


def test_a_model_that_is_not_base_and_adapter_is_refused(bank: AdapterBank, base: Base) -> None:
    changes: list[tuple[Callable[[Any], object], str]] = [
        (
            lambda model: model.bert.attach_adapter("other", heads=1),
            "active adapters are other, own, and a bank holds 'own' alone",
        ),
        (lambda model: model.bert.set_active_adapters([]), "active adapters are none"),
        (
            lambda model: model.bert.detach_adapter("own"),
            "has no adapter, and a bank holds adapters beside a frozen base; train one with one of --method",
        ),
        (change_base, r"layer.1.output.LayerNorm.bias \(float32\) is not as in the bank's base \(1 tensors differ"),
        (lambda model: model.to(torch.bfloat16), r"\(bfloat16\) is not as in the bank's base"),
        (lambda model: setattr(model.config, "layer_norm_eps", 1e-6), "has layer_norm_eps 1e-06"),
        (lambda model: setattr(model.config, "head_bilstm", 4), "has a BiLSTM below its head, and a bank holds"),
        (lambda model: setattr(model.config, "causal", True), "has causal True and the bank's base has False"),
    ]
    for change, message in changes:
        model = make_model(base)
        change(model)
        with pytest.raises(RunError, match=message):
            bank.add("law", model, "own")
    for method, new_words, message in (
        ({"module_hidden_size": 8, "module_ffn_size": 8}, [], "has extension modules of width 8"),
        ({}, [[7], [8, 9]], "has 2 new words"),
        ({"lora_rank": 2}, [], "has LoRA"),
    ):
        settings = MethodConfig(adapter="own", ffn_units=4, **method)
        model = ModelSpec(base, settings, new_words=new_words).build()
        with pytest.raises(RunError, match=message):
            bank.add("law", model, "own")
    with pytest.raises(RunError, match="does not hold a DomextModel"):
        bank.add("law", DomextModel(base.config), "own")
    with pytest.raises(RunError, match=r"other labels \(O, B-Drug, I-Drug\) than the model's head \(label-1-0, "):
        bank.add("few", make_model(base, TOKENS), "own", task=TASK)
    assert bank.names() == []


def test_another_base_is_refused(bank: AdapterBank, base: Base, headless_folder: Path, tmp_path: Path) -> None:
    moved = replace(base.files, tensors={name: tensor + 0.01 for name, tensor in base.tensors.items()})
    other = replace(base, read=moved)
    bank.add("law", make_model(base), "own")
    with pytest.raises(RunError, match="is not as in the bank's base"):
        bank.add("art", make_model(other), "own")
    with pytest.raises(RunError, match="is not as in the bank's base"):
        bank.attach(make_plain(other), "law")
    lora = MethodConfig(heads=0, ffn_units=0, lora_rank=2)
    wrapped = ModelSpec(base, lora).build()
    with pytest.raises(RunError, match="merge LoRA first"):
        bank.attach(wrapped, "law")
    opened = AdapterBank.open(bank.folder, str(headless_folder))
    with pytest.raises(RunError, match="is one of a base of sha256"):
        opened.load("law")
    assert len(opened.verify()) == 1
    foreign = AdapterBank.create(tmp_path / "foreign", str(headless_folder))
    shutil.copytree(bank.folder / "adapters" / "law", foreign.folder / "adapters" / "law")
    with pytest.raises(RunError, match="'law' was trained on a base of sha256"):
        foreign.load("law")


@pytest.mark.parametrize("file", ["adapter-.*.safetensors", "adapter.json"])
def test_a_flipped_byte_is_one_sentence(file: str, bank: AdapterBank, base: Base) -> None:
    for name in ("law", "art"):
        bank.add(name, make_model(base), "own")
    path = find_tensors(bank, "law") if "-" in file else Path(bank.folder / "adapters" / "law" / file)
    content = path.read_bytes()
    for place in (len(content) - 20, len(content) // 2, 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(RunError, match=f"{file} .*; remove the adapter and add it again"):
            bank.load("law")
    assert len(bank.verify()) == 1
    path.unlink()
    if "-" in file:
        with pytest.raises(RunError, match=f"{file} .*; remove the adapter"):
            bank.attach(make_plain(base), "law")
        assert len(bank.verify()) == 1
        bank.remove("law")
    bank.load("art")
    assert bank.names() == ["art"]
    bank.add("law", make_model(base), "own")
    assert not bank.verify()


def test_damaged_json_of_a_bank_is_one_sentence(bank: AdapterBank, base: Base) -> None:
    bank.add("law", make_model(base), "own")
    for content in ("[]", "{", "[" * 5000, '{"format": 4}', '{"format": 4, "values": {"base": "x"}}', "\0"):
        Path(bank.folder / "adapters" / "law" / "adapter.json").write_text(content)
        with pytest.raises(RunError, match=r"adapter\.json .*; remove the adapter and add it again\.$") as caught:
            bank.describe("law")
        assert bank.verify() == [str(caught.value)]
        header = (bank.folder / "bank.json").read_text()
        Path(bank.folder / "bank.json").write_text(content)
        with pytest.raises(RunError, match=r"bank\.json .*; make the bank again\.$"):
            AdapterBank.open(bank.folder)
        Path(bank.folder / "bank.json").write_text(header)


def test_an_adapter_is_a_folder_of_the_bank(bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    bank.add("law", make_model(base), "own")
    place = Path(bank.folder / "adapters")
    (place / "law").rename(tmp_path / "law")
    (place / "law").symlink_to(tmp_path / "law")
    assert bank.names() == []
    for name in ("../../law", "law", "..", ""):
        with pytest.raises(RunError, match="has no adapter"):
            bank.load(name)
    shutil.copytree(tmp_path / "law", place / "forward")
    assert bank.names() == [], "torch cannot call an adapter so"
    (place / "law").unlink()
    shutil.move(tmp_path / "law", place / "law")
    (place / "law" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="notes.txt is no part of the adapter"):
        bank.remove("law")
    assert (place / "law" / "notes.txt").read_text() == "mine"


def test_a_bank_names_no_place_of_this_machine(bank: AdapterBank, base: Base) -> None:
    bank.add("law", make_model(base), "own", {"run": "clinic"})
    for path in (bank.folder / "bank.json", *Path(bank.folder / "adapters" / "law").iterdir()):
        assert str(base.folder.parent).encode() not in path.read_bytes(), path.name
    assert AdapterBank.open(bank.folder).base.sha256 == base.sha256
    (bank.folder / ".base_folder").delete()  # passed on without it
    with pytest.raises(BaseModelError, match="'tiny-bert'"):
        AdapterBank.open(bank.folder).load("law")
    assert not AdapterBank.open(bank.folder, base.id).verify()


def test_a_crash_before_the_description_leaves_the_bank_sound(
    bank: AdapterBank, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, put = make_model(base), Place.put
    bank.add("art", model, "own")
    seen = read_state(Path(bank.folder))

    def stop(self: Place, *args: Any, **settings: Any) -> str:
        if self.name == "adapter.json":
            raise KeyboardInterrupt
        return put(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StorageError, match=r"law/adapter-.* cannot be .*written \(No space left on device\)"):
            bank.add("law", model, "own")
    assert read_state(Path(bank.folder)) == seen
    with monkeypatch.context() as patch:
        patch.setattr(Place, "put", stop)
        with pytest.raises(KeyboardInterrupt):
            bank.add("law", model, "own")
    found = read_state(Path(bank.folder))
    assert len(found) == len(seen) + 1 and {path: found[path] for path in seen} == seen
    reopened = AdapterBank.open(bank.folder)
    assert reopened.names() == ["art"] and not reopened.verify()
    reopened.add("law", model, "own")
    assert reopened.names() == ["art", "law"] and not reopened.verify()


def refuse(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_of_two_that_add_one_name_the_second_is_refused(
    bank: AdapterBank, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both add the same model: their tensors are one file then."""
    put, batch = Place.put, make_batch(base, 2)
    for seed in (1, 2):
        first, second, name = make_model(base), make_model(base, seed=seed), f"law{seed}"

        def be_late(self: Place, *args: Any, **settings: Any) -> str:
            monkeypatch.setattr(Place, "put", put)
            written = put(self, *args, **settings)
            bank.add(name, first, "own")  # noqa: B023
            return written

        monkeypatch.setattr(Place, "put", be_late)
        with pytest.raises(RunError, match=f"{name} cannot be written .another process made it meanwhile"):
            bank.add(name, second, "own")
        assert not bank.verify() and find_tensors(bank, name)
        assert torch.equal(score(bank.load(name), batch), score(first, batch))


def test_a_bank_in_a_bucket_is_one_on_a_disk(objects: str, bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    folder = f"{BUCKET}/{tmp_path.name}/bank"
    make_run(base, tmp_path / "clinic", MethodConfig(heads=0, ffn_units=0, bottleneck_size=5))
    for place in (folder, str(bank.folder)):
        code, said, error = call_job("bank", "--bank", place, "--add", str(tmp_path / "clinic"), "--name", "law")
        assert code == 0 and said.endswith(f" bytes, to {place}\n"), error
    there, run = AdapterBank.open(folder), Place(f"{BUCKET}/{tmp_path.name}/clinic")
    with pytest.raises(RunError, match="exists already"):
        AdapterBank.create(folder, base.id)
    assert there.describe("law") == bank.describe("law") and there.base_id == bank.base_id
    for file in Place(tmp_path / "clinic").list_files():
        (run / file).put((tmp_path / "clinic" / file).read_bytes())
    there.add_run("art", str(run))
    there.add("zoo", make_model(base, SEQUENCES), "own")
    server, batch = serve_adapters(there), make_batch(base, 2)
    assert there.names() == server.names() == ["art", "law", "zoo"] and not there.verify()
    found = server(**batch, adapter_names=["law", "zoo"])
    torch.testing.assert_close(found[0], score(bank.load("law"), batch)[0], atol=1e-5, rtol=0)
    there.remove("zoo")
    code, said, error = call_job("bank", "--bank", folder, "--verify", "true")
    assert (code, said) == (0, "sound: the base, and every adapter (2)\n"), error
    assert Place(folder).list_files()[0] == ".base_folder" and len(Place(folder).list_files()) == 6
    code, _, error = call_job("bank", "--bank", f"{BUCKET}/{tmp_path.name}/none")
    assert code == 2 and f"{tmp_path.name}/none', which does not exist" in error
    (Place(folder) / "adapters/law/adapter.json").put(b"{}")
    assert "adapter.json has no format; remove the adapter and add it again." in there.verify()[0]


def test_a_folder_that_is_no_bank_is_refused(tmp_path: Path, tiny_base_folder: Path, bank: AdapterBank) -> None:
    with pytest.raises(RunError, match="is no adapter bank"):
        AdapterBank.open(tmp_path)
    with pytest.raises(RunError, match="exists already"):
        AdapterBank.create(bank.folder, str(tiny_base_folder))
    header = Path(bank.folder / "bank.json")
    header.write_text(header.read_text().replace('"format": 4', '"format": 1'))
    with pytest.raises(
        RunError, match="has format 1, which no released .* reads; this version reads format 4; make the bank"
    ):
        AdapterBank.open(bank.folder)


def test_a_run_is_added(bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    """One that makes vectors leaves its pooling."""
    method = MethodConfig(name="houlsby", heads=0, ffn_units=0, bottleneck_size=5, layers="1")
    model = make_run(base, tmp_path / "clinic", method)
    entry = bank.add_run("law", tmp_path / "clinic")
    assert entry.origin == {"run": "clinic", "method": "houlsby", "step": 7} and entry.architecture == MASKED_LM
    assert entry.num_parameters == sum(param.numel() for param in model.parameters() if param.requires_grad)
    batch = make_batch(base, 3)
    assert torch.equal(score(bank.load("law"), batch), score(model, batch))
    poolings: tuple[Pooling, ...] = ("mean", "cls")
    for pooling in poolings:
        make_run(base, tmp_path / pooling, method, objective=ObjectiveConfig(kind="infonce", pooling=pooling))
        assert bank.add_run(pooling, tmp_path / pooling).origin["pooling"] == pooling
    assert bank.verify() == []


FULL = MethodConfig(heads=0, ffn_units=0, trains="all")


def test_a_fine_tuned_model_is_added_with_its_task(bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    """A new bank takes the base from the run. Answers are compared in serving/test_served_models.py."""
    start = open_model(bank.base_id).load()
    task, fitted = fit(start, "classification", replace(BESIDE, heads=1, ffn_units=6))
    write_finetuning(tmp_path / "tuned", bank.base_id)
    export_stages(start, task, fitted, Place(tmp_path / "tuned" / "export"))
    for i, place in enumerate(("tuned", "tuned/export")):
        run_bank(BankConfig(bank=str(tmp_path / f"new{i}"), add=str(tmp_path / place), name="first"))
        new = AdapterBank.open(tmp_path / f"new{i}")
        assert new.names() == ["first"] and new.base_sha256 == bank.base_sha256 and new.base_id == bank.base_id
    entry = new.describe("first")
    assert entry.origin == {"run": "tuned", "set": "made"} and new.verify() == []
    assert entry.task == describe_task(task)
    bank.add("words", make_model(base), "own")
    assert bank.describe("words").task is None


def test_a_fine_tuned_model_that_is_more_than_an_adapter_is_refused(bank: AdapterBank, tmp_path: Path) -> None:
    start = open_model(bank.base_id).load()
    for family, method, reason in (
        (
            "classification",
            WHOLE,
            "has no adapter, and a bank holds adapters beside a frozen base; train one with one of --method.",
        ),
        ("qa", BESIDE, "a bank does not hold a DomextForQuestionAnswering"),
        ("relation_extraction", BESIDE, "takes 2 models for its task, and an adapter is one model"),
        ("normalization", BESIDE, "does not hold a sequence_classification head of the task normalization"),
    ):
        task, fitted = fit(start, family, method, epochs=0.4)
        export_stages(start, task, fitted, Place(tmp_path / family))
        with pytest.raises(RunError, match=reason):
            bank.add_run("tuned", tmp_path / family)
    assert not bank.names()
    with pytest.raises(ConfigError, match=r"--base is empty; it must say what the new bank's base is: .* no longer in"):
        run_bank(BankConfig(bank=str(tmp_path / "new"), add=str(tmp_path / "qa"), name="tuned"))


def write_finetuning(run_dir: Path, model: str) -> Path:
    """Write what a fine-tuning run says of itself."""
    (run_dir / "trainings").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_yaml(FinetuneConfig(task="ncbi", data="labelled", model=model)))
    return run_dir


def test_a_base_is_at_the_beginning_of_all_runs(base: Base, tmp_path: Path) -> None:
    make_run(base, tmp_path / "clinic", MethodConfig(heads=0, ffn_units=0, bottleneck_size=5))
    write_finetuning(tmp_path / "first", str(tmp_path / "clinic"))
    write_finetuning(tmp_path / "second", str(tmp_path / "first" / "export"))
    task, fitted = fit(open_model(str(base.folder)).load(), "classification", BESIDE)
    export_stages(open_model(str(base.folder)).load(), task, fitted, Place(tmp_path / "first" / "export"))
    assert find_base(str(tmp_path / "second")) == str(base.folder)
    make_run(base, tmp_path / "whole", FULL)
    assert find_base(str(write_finetuning(tmp_path / "third", str(tmp_path / "whole")))) == str(tmp_path / "whole")
    assert find_base(str(write_finetuning(tmp_path / "fourth", "general-mini"))) == "general-mini"


def nudge_words(model: DomextForMaskedLM) -> str:
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] += 0.01
    return "bert.embeddings.word_embeddings.weight"


def test_a_run_whose_base_changed_or_that_has_more_is_refused(bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    for name, method, change, message in (
        ("whole", FULL, None, "has no adapter, and a bank"),
        (
            "nudged",
            MethodConfig(ffn_units=4),
            nudge_words,
            r"word_embeddings.weight .* is not as in the bank's base \(1 tensors differ",
        ),
    ):
        make_run(base, tmp_path / name, method, change)
        with pytest.raises(RunError, match=message):
            bank.add_run("law", tmp_path / name)
    assert bank.names() == []
    with pytest.raises(RunError, match="has no adapter, and a bank"):
        run_bank(BankConfig(bank=str(tmp_path / "new"), add=str(tmp_path / "whole"), name="law"))
    assert not (tmp_path / "new").exists(), "a first run that is refused leaves no bank"


def test_a_run_of_another_base_or_task_is_refused(bank: AdapterBank, base: Base, tmp_path: Path) -> None:
    moved = tmp_path / "other-base"
    shutil.copytree(base.folder, moved)
    tensors = load_file(moved / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"] += 0.01
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    other = load_base(str(moved))
    assert other.sha256 != base.sha256
    make_run(other, tmp_path / "run", MethodConfig(ffn_units=4))
    with pytest.raises(RunError, match="is not as in the bank's base .* give each base a bank of its own"):
        bank.add_run("law", tmp_path / "run")
    config = PretrainConfig(base=base.id, objective=ObjectiveConfig(next_sentence=True))
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(config))
    with pytest.raises(RunError, match="trained next-sentence prediction"):
        bank.add_run("law", tmp_path / "run")
    with pytest.raises(RunError, match="is no run directory"):
        bank.add_run("law", tmp_path)


def test_the_job_lists_and_verifies(base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, sound, damaged = (tmp_path / name for name in ("run", "bank", "damaged"))
    make_run(base, run_dir, MethodConfig(ffn_units=4, bottleneck_size=6))
    run_bank(BankConfig(bank=str(sound), add=str(run_dir), name="clinic"))
    assert capsys.readouterr().out.startswith("added: clinic, 4,688 parameters, ")
    run_bank(BankConfig(bank=str(sound), verify=True))
    assert capsys.readouterr().out == "sound: the base, and every adapter (1)\n"
    shutil.copytree(sound, damaged)
    (path,) = (damaged / "adapters" / "clinic").glob("adapter-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    code, table, error = call_job("bank", "--bank", str(sound))
    assert code == 0, error
    title, _, line = table.splitlines()
    assert title.startswith(f"base {base.id} (sha256 {base.sha256[:12]})") and title.endswith("adapters: 1")
    assert line.split()[:9] == "clinic masked_lm heads 1, FFN units 4, bottleneck 6".split()
    assert line.split()[9:] == ["0-1", "4,688", f"{(path.stat().st_size):,}"]
    code, problems, error = call_job("bank", "--bank", str(damaged), "--verify", "true")
    assert code == 2 and f"{path} differs from the sha256" in problems
    assert error == f"error: the bank {damaged} is damaged: 1 of its parts, named above.\n"


def test_the_job_removes_what_is_damaged(
    bank: AdapterBank, base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank.add("clinic", make_model(base), "own")
    Path(bank.folder / "adapters" / "clinic" / "adapter.json").write_text("{")
    folder = str(bank.folder)
    run_bank(BankConfig(bank=folder))
    assert "\nclinic  damaged: --verify true says where\n" in capsys.readouterr().out
    run_bank(BankConfig(bank=folder, remove="clinic"))
    assert bank.names() == []
    with pytest.raises(RunError, match="has no adapter 'clinic'; it has none"):
        run_bank(BankConfig(bank=folder, remove="clinic"))


def test_options_that_contradict_each_other_are_refused() -> None:
    for options, message in (
        ("", "--bank is ''"),
        ("--bank b --add run", "--name is ''"),
        ("--bank b --add run --name a-b", "letters, digits and underscores"),
        ("--bank b --name law", "empty without --add"),
        ("--bank b --remove law --verify true", "--remove and --verify are both given"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(BankConfig, args=options.split())
