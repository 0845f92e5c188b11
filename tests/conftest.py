"""Tiny bases for every test: real checkpoints with real tokenizers, made in the session's temporary folder."""

from __future__ import annotations

import gc
import os
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before transformers is imported: no test may reach for the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("RAY_AUTH_MODE", None)  # what a shell says of it is not what users get

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizer,
)

from domext_ray.runtime import device

if TYPE_CHECKING:
    from model_hub import ModelHub

REPOSITORY = Path(__file__).resolve().parents[1]
FEW_SENTENCES = REPOSITORY / "tests" / "helpers" / "few_sentences.txt"
"""A general probe of six sentences: an evaluation of the 371 that ship takes longer than all steps of a tiny run."""
WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like now over such our man me "
    "even most made after also did many off before must well back through years much where way down should because "
    "long each just state those people too good very day house water small city river morning book read write paper "
    "table bread market train school teacher child garden tree green winter rain sun wind night light door window road "
    "walk run cat dog bird horse patient doctor disease cell protein blood heart gene drug dose study group result "
    "treat test care model data table value function return list string file line number"
).split()
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.1,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole jobs and trainings first: the files that two processes end with are short ones."""
    long = "jobs methods golden training finetuning studies config models data corpus vocabulary".split()
    rank = {name: i for i, name in enumerate(long)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(REPOSITORY / "tests").parts[0], len(long)))


def pytest_collection_finish() -> None:
    """Half a million objects that stay: the garbage collector need not look at them again and again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _use_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _keep_code_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes copy the code of exports into a folder that can be written, whatever HF_HOME says."""
    os.environ["HF_MODULES_CACHE"] = str(tmp_path_factory.mktemp("modules"))


@pytest.fixture(autouse=True)
def _give_back_kernels() -> Iterator[None]:
    """What a test computed in this process as a worker does leaves torch's own products to the next test."""
    yield
    device._products = None


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers copies an export's code and imports it from there: here, for one test."""

    def forget_modules() -> None:
        for name in [loaded for loaded in sys.modules if loaded.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    others = [folder for folder in sys.path if not Path(folder, "transformers_modules").is_dir()]  # of tests before
    monkeypatch.setattr(sys, "path", others)
    forget_modules()
    yield
    forget_modules()


def write_corpus(path: Path, num_lines: int, seed: int = 0) -> Path:
    """Write lines of random words that the tiny bases know."""
    random = np.random.default_rng(seed)
    path.write_text("".join(" ".join(random.choice(WORDS, 14)) + ".\n" for _ in range(num_lines)), encoding="utf-8")
    return path


def make_random_model(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Make a model with every tensor off its usual start: a LayerNorm of ones or a bias of zeros hides a wrong name."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    return model


def write_tokenizer(folder: Path) -> int:
    """Save a tokenizer of about 250 WordPieces; return how many."""
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *".,;:!?'\"()-",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *WORDS]))}
    BertTokenizer(vocab=vocabulary, model_max_length=128).save_pretrained(folder)
    return len(vocabulary)


def make_tiny_base(folder: Path) -> Path:
    """Save a BertForMaskedLM: 2 layers, 32 wide, 4 heads, 64 FFN units, 128 positions, about 250 WordPieces."""
    config = BertConfig(vocab_size=write_tokenizer(folder), max_position_embeddings=128, **SHAPE)
    make_random_model(BertForMaskedLM, config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, num_rows: int) -> Path:
    """Save a WordPiece tokenizer of as many entries as a model has rows, beside the model; return the folder."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)][:num_rows]
    BertTokenizer(vocab={name: i for i, name in enumerate(names)}, model_max_length=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny BERT."""
    return make_tiny_base(tmp_path_factory.mktemp("bases") / "tiny-bert")


@pytest.fixture(scope="session")
def tiny_roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved RobertaForMaskedLM of the same shape, with a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("bases") / "tiny-roberta"
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator([" ".join(WORDS)] * 4, vocab_size=340, special_tokens=specials, show_progress=False)
    learned.save_model(str(tmp_path_factory.getbasetemp()), "tiny-roberta")
    files = [str(tmp_path_factory.getbasetemp() / f"tiny-roberta-{name}") for name in ("vocab.json", "merges.txt")]
    tokenizer = RobertaTokenizer(*files, model_max_length=128)
    tokenizer.save_pretrained(folder)
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=130, type_vocab_size=1, **SHAPE)
    make_random_model(RobertaForMaskedLM, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    """The tiny BERT's tokenizer."""
    return AutoTokenizer.from_pretrained(tiny_base_folder)


@pytest.fixture(scope="session")
def roberta(tiny_roberta_folder: Path) -> PreTrainedTokenizerBase:
    """The tiny RoBERTa's tokenizer."""
    return AutoTokenizer.from_pretrained(tiny_roberta_folder)


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The address of an S3 server of this session's own, with a bucket."""
    from object_store import serve_objects

    with serve_objects() as address:
        yield address


@pytest.fixture(scope="session")
def local_ray(object_server: str) -> Iterator[None]:
    """A Ray of this session's own, as a job starts it, whose processes know the session's S3 server."""
    import ray
    from object_store import use_objects

    from domext_ray.runtime.ray_cluster import start_ray

    with pytest.MonkeyPatch.context() as patched:
        use_objects(object_server, patched)
        patched.setenv(
            "RAY_kill_idle_workers_interval_ms", "0"
        )  # one that has imported torch serves the next test, too
        start_ray()
    yield
    ray.shutdown()


@pytest.fixture
def objects(object_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address, to which this process and those that it starts are pointed, with a cache of this test's."""
    from object_store import use_objects

    use_objects(object_server, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return object_server


@pytest.fixture
def model_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub without a file, which this process may ask, with a cache of this test's."""
    from model_hub import serve_names

    with serve_names() as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        yield hub


@pytest.fixture
def far_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_ADDRESS names a cluster that is not there; the session's own Ray, if a test has started it, is not seen."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
