"""Small tokenizers of each family, learned on the prose that ships: as the bases have them that people adapt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import REPOSITORY
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, RobertaTokenizer, XLMRobertaTokenizer

PROSE = (REPOSITORY / "domext_ray" / "assets" / "general_probe.txt").read_text(encoding="utf-8").splitlines()
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def learn_bytes(specials: list[str], num_entries: int = 700) -> dict[str, Any]:
    """Learn byte-level BPE; return the model's record."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_entries, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def save_roberta(folder: Path, **options: Any) -> Path:
    """RoBERTa's: a class of its own, which makes its rules itself when it is loaded."""
    model = learn_bytes([*SPECIALS, "<mask>"])
    merges = [tuple(pair) for pair in model["merges"]]
    RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=128, **options).save_pretrained(folder)
    return folder


def save_modernbert(folder: Path) -> Path:
    """ModernBERT's: NFC, runs of spaces as tokens, and special tokens behind the model's vocabulary."""
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": learn_bytes(["|||IP_ADDRESS|||"])}))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["|||IP_ADDRESS|||", "    ", "   ", "  "])
    names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    tokenizer.add_special_tokens(["<|endoftext|>", *names.values()])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    tokens = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=128, model_input_names=["input_ids", "attention_mask"], **tokens
    ).save_pretrained(folder)
    return folder


def save_xlm_roberta(folder: Path) -> Path:
    """XLM-R's: a unigram model, which takes no new words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(PROSE, trainer)
    vocab = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    XLMRobertaTokenizer(vocab=[*vocab, ("<mask>", 0.0)], model_max_length=128).save_pretrained(folder)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "roberta": save_roberta,
    "roberta with a space first": lambda folder: save_roberta(folder, add_prefix_space=True),
    "modernbert": save_modernbert,
}
"""Those that take new words."""
