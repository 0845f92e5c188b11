"""Tokenizers: load one, fingerprint one, learn a WordPiece vocabulary for a model without a base."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from domext_ray.config import PrepareConfig, VocabConfig
from domext_ray.corpus.sources import Sources, read_documents, resolve_sources
from domext_ray.errors import CorpusError

if TYPE_CHECKING:  # transformers loads torch: seconds and 250 MB that reading tasks need not spend
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SAMPLE_BYTES = 200 * 2**20
"""Text that a vocabulary is learned from, at most; tasks are taken evenly over the corpus."""


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    Args:
        folder: as `save_pretrained` wrote it.

    Raises:
        CorpusError: there is none, it has no fast implementation, or it lacks a special token that masking needs.
    """
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise CorpusError(f"{folder} is no folder; a tokenizer's folder is needed.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise CorpusError(
            f"{folder} holds no tokenizer that can be loaded ({' '.join(str(error).split())[:200]})."
        ) from error
    if not tokenizer.is_fast:
        raise CorpusError(f"the tokenizer of {folder} has no tokenizer.json; save it with a fast implementation.")
    missing = [name for name in ("cls", "sep", "mask", "pad") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise CorpusError(f"the tokenizer of {folder} has no {missing[0]} token; masked-language modelling needs one.")
    return tokenizer


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides a text's ids: vocabulary, normaliser, pre-tokenizer, model, special tokens.

    Padding, truncation and the layout of the files do not matter.
    """
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    kept: dict[str, Any] = {name: record.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    kept["special"] = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "unk")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def learn_wordpiece(spec: str, prepare: PrepareConfig, vocab: VocabConfig, folder: Path, model_max_length: int) -> Path:
    """Learn a WordPiece vocabulary on a corpus and save it as a BERT tokenizer.

    Args:
        spec: the `--corpus` option.
        prepare: how documents are read.
        vocab: size, and whether text is lowercased.
        folder: where to save; a folder learned from the same content with the same settings is kept.
        model_max_length: longest row of the model, tokens.

    Returns:
        The folder.

    Raises:
        CorpusError: the size leaves no room beside the alphabet.
    """
    from transformers import BertTokenizer

    sources = resolve_sources(spec, prepare)
    record = {"content": sources.fingerprint, "size": vocab.size, "lowercase": vocab.lowercase}
    path = folder / "learned_from.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) == record:
        return folder
    alphabet = _choose_alphabet(sources, prepare, vocab)
    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=vocab.lowercase)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab.size,
        special_tokens=[*SPECIAL_TOKENS, *_list_continuations(wordpiece, alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    wordpiece.train_from_iterator(_sample_documents(sources, prepare), trainer)
    tokenizer = BertTokenizer(
        vocab=wordpiece.get_vocab(), do_lower_case=vocab.lowercase, model_max_length=model_max_length
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        tokenizer.save_pretrained(temporary)
        (temporary / path.name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _sample_documents(sources: Sources, prepare: PrepareConfig) -> Iterator[str]:
    stride = max(1, -(-sources.num_bytes // SAMPLE_BYTES))
    read = 0
    for task in sources.tasks[::stride]:
        for document in read_documents(task, prepare, Counter()):
            yield document
            read += len(document.encode())
            if read > SAMPLE_BYTES:
                return


def _list_continuations(wordpiece: Tokenizer, alphabet: list[str]) -> list[str]:
    """The entries for characters inside of words.

    Given to the trainer in a fixed order: its own is that of a hash table, and the order decides between equal counts.
    """
    joined = [wordpiece.normalizer.normalize_str(f"a{each}") for each in alphabet]
    return [
        f"##{character}"
        for character, text in zip(alphabet, joined, strict=True)
        if len(wordpiece.pre_tokenizer.pre_tokenize_str(text)) == 1
    ]


def _choose_alphabet(sources: Sources, prepare: PrepareConfig, vocab: VocabConfig) -> list[str]:
    """The characters that get an entry: those that make up 99.98 % of the text, in at most half of the entries.

    Every character costs two entries (at the start and inside of a word), unless it is always a word of its own.
    """
    normalizer = normalizers.BertNormalizer(lowercase=vocab.lowercase)
    counts: Counter[str] = Counter()
    seen = 0
    for document in _sample_documents(sources, prepare):
        counts.update(normalizer.normalize_str(document))
        seen += len(document)
        if seen > SAMPLE_BYTES // 20:
            break
    del counts[" "]
    total, covered, alphabet = sum(counts.values()), 0, []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= 0.9998 * total:
            break
        covered += count
        alphabet.append(character)
    kept = len(alphabet)
    if not kept:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable line; give text.")
    if 2 * min(kept, 64) + len(SPECIAL_TOKENS) > vocab.size:
        raise CorpusError(
            f"--vocab.size is {vocab.size}; the corpus' alphabet of {kept} characters alone needs "
            f"{2 * min(kept, 64) + len(SPECIAL_TOKENS)} entries."
        )
    return sorted(alphabet[: (vocab.size - len(SPECIAL_TOKENS)) // 2])
