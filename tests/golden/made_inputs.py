"""What the golden runs read: bases, texts, labelled sets, made of whole numbers and words alone.

Nothing here imports the package, and nothing rounds: weights are multiples of 1/1024, vocabularies are learned by
counting, so every machine makes the same bytes.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

WORDS = (
    "the of and to in is that for it as was with be by on not he but at are this have from or had an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like now over such our man "
    "water small city river morning book read write paper table bread market train school teacher child garden tree "
    "green winter rain sun wind night light door window road walk run cat dog bird horse patient doctor disease cell "
    "protein blood heart gene drug dose study group result treat test care model data value function return list"
).split()
NEW_WORDS = ["gluconate", "bronchitis", "stent", "nephritis", "ischemia"]
HAN = "患者出现高血压和糖尿病，医生建议每天服用药物治疗。心脏功能检查结果正常，需要继续观察血糖变化。"
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
MODERN = {"local_attention": 8, "pad_token_id": 0, **dict.fromkeys(("bos_token_id", "eos_token_id"))}
MODERN |= dict.fromkeys(("cls_token_id", "sep_token_id"))
DISTIL = {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64}
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "uncased", {}),
    "cased": ("Bert", "cased", {}),
    "roberta": ("Roberta", "bytes", {"max_position_embeddings": 130, "type_vocab_size": 1}),
    "camembert": ("Camembert", "pieces", {"max_position_embeddings": 130, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", "uncased", MODERN),
    "distilbert": ("DistilBert", "uncased", DISTIL),
    "electra": ("Electra", "uncased", {"embedding_size": 32}),
}
"""By name: transformers' family, the kind of vocabulary, and what differs in the configuration."""


def make_inputs(folder: Path) -> None:
    """Write everything into a folder."""
    for name in BASES:
        make_base(folder / "bases" / name, name)
    make_texts(folder / "texts")
    for family in FAMILIES:
        make_set(folder / "sets" / family, family)
    (folder / "probe.txt").write_text("".join(f"{line}\n" for line in make_lines(6, "probe")), encoding="utf-8")
    (folder / "words.txt").write_text("\n".join(NEW_WORDS) + "\n", encoding="utf-8")


# --- bases ----------------------------------------------------------------------------------------------------------


def make_base(folder: Path, name: str) -> None:
    """Save a model of two layers and its tokenizer."""
    family, kind, values = BASES[name]
    size = TOKENIZERS[kind](folder)
    shape = {} if family == "DistilBert" else SHAPE
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": size, "max_position_embeddings": 128, **shape, **values}
    )
    model = getattr(transformers, f"{family}ForMaskedLM")(config)
    generator = np.random.default_rng(len(name))
    with torch.no_grad():
        for key, param in sorted(model.named_parameters()):
            drawn = generator.integers(-128, 129, tuple(param.shape)).astype(np.float32) / 1024
            is_scale = key.endswith("norm.weight") or "LayerNorm.weight" in key or "layer_norm.weight" in key
            if param.shape == (size,):  # of the MLM head: a few words are likely, so that some predictions are right
                drawn += np.float32(4) * (np.arange(size) % 16 == 0)
            param.copy_(torch.from_numpy(drawn + np.float32(is_scale)))
    model.save_pretrained(folder)


def make_wordpiece(folder: Path, lowercase: bool) -> int:
    """Save a WordPiece tokenizer; the cased one knows Han characters and capitals."""
    letters = string.ascii_lowercase + string.digits + ("" if lowercase else string.ascii_uppercase)
    han = [] if lowercase else sorted({character for character in HAN if character.isalnum()})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,;:!?'\"()-，。", *letters]
    tokens += [*(f"##{letter}" for letter in letters), *han, *(f"##{character}" for character in han), *WORDS]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    BertTokenizer(vocab=vocabulary, do_lower_case=lowercase, model_max_length=128).save_pretrained(folder)
    return len(vocabulary)


def make_bytes(folder: Path) -> int:
    """Save a byte-level BPE tokenizer; each merge joins the pair that occurs most, the first of equals."""
    words, merges = [["Ġ", *word] for word in WORDS], []
    for _ in range(120):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [_merge(word, best) for word in words]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    RobertaTokenizer(vocab=vocabulary, merges=merges, model_max_length=128).save_pretrained(folder)
    return len(vocabulary)


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for piece in word:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def make_pieces(folder: Path) -> int:
    """Save a unigram tokenizer with XLM-R's rules: whole words, pairs of letters, letters."""
    counts = Counter({f"▁{word}": 40 for word in WORDS})
    counts += Counter(word[i : i + 2] for word in WORDS for i in range(len(word) - 1))
    counts += Counter(dict.fromkeys("▁" + string.printable.strip(), 1))
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    scored = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    pieces = [
        *((special, 0.0) for special in specials),
        *((piece, round(math.log(n / 9000), 4)) for piece, n in scored),
    ]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    ).save_pretrained(folder)
    return len(pieces) + 1


TOKENIZERS = {
    "uncased": lambda folder: make_wordpiece(folder, True),
    "cased": lambda folder: make_wordpiece(folder, False),
    "bytes": make_bytes,
    "pieces": make_pieces,
}

# --- texts ----------------------------------------------------------------------------------------------------------


def make_lines(number: int, seed: str) -> list[str]:
    """Make sentences: capitals, new words, accents, numbers, and what no vocabulary knows."""
    drawn = random.Random(seed)
    lines = []
    for i in range(number):
        words = drawn.choices(WORDS, k=drawn.randint(8, 16))
        if i % 3 == 0:
            words.insert(drawn.randrange(len(words)), drawn.choice(NEW_WORDS))
        if i % 7 == 0:
            words.insert(
                drawn.randrange(len(words)), drawn.choice(["naïve", "Café", "12.5", "β-cells", "🩺", "O'Neil"])
            )
        lines.append(f"{' '.join(words).capitalize()}.")
    return lines


def make_han(number: int) -> list[str]:
    """Make Chinese sentences."""
    drawn, parts = random.Random("han"), HAN.replace("。", "，").strip("，").split("，")
    return ["，".join(drawn.sample(parts, 3)) + f"{i}。" for i in range(number)]


def make_texts(folder: Path) -> None:
    """Write the same text in every format that a corpus may have, and others."""
    folder.mkdir(parents=True)
    lines = make_lines(90, "text")
    # What is to be left out: a repeated line, one that is too short, white space, a control character.
    lines += [lines[3], "short", "  ", f"A line\twith  spaces and a \x07 control character: {lines[5]}"]
    content = "".join(f"{line}\n" for line in lines)
    paragraphs = "".join(f"{line}\n" + ("\n" if i % 4 == 3 else "") for i, line in enumerate(lines))
    records = [{"id": i, "text": line, "title": f"Title {i} {lines[(i * 7) % 90]}"} for i, line in enumerate(lines)]
    odd = [{"id": 900, "text": None}, {"id": 901, "title": "no text here"}, {"id": 902, "text": ""}]
    rows = [*records[:30], *odd, *records[30:]]

    def write(name: str, text: str) -> None:
        encoded = text.encode()
        (folder / name).write_bytes(gzip.compress(encoded, mtime=0) if name.endswith(".gz") else encoded)

    write("lines.txt", content)
    write("lines.txt.gz", content)
    write("bom.txt", "\ufeff" + content.replace("\n", "\r\n"))
    write("paragraphs.txt", paragraphs)
    write("han.txt", "".join(f"{line}\n" for line in make_han(60)))
    write("general.txt", "".join(f"{line}\n" for line in make_lines(60, "general")))
    write("more.txt", "".join(f"{line}\n" for line in make_lines(70, "more")))
    write("records.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write("records.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows))
    write("records.tsv", "id\ttext\n" + "".join(f"{i}\t{line.replace(chr(9), ' ')}\n" for i, line in enumerate(lines)))
    with (folder / "records.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "text", "title"], *([row["id"], row["text"], row["title"]] for row in records)])
    table = pa.Table.from_pylist(rows, schema=pa.schema({"id": pa.int64(), "text": pa.string(), "title": pa.string()}))
    pq.write_table(table, folder / "records.parquet", row_group_size=20)
    with pa.ipc.new_stream(folder / "records.arrow", table.schema) as stream:
        stream.write_table(table)
    import datasets

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(folder / "saved"))
    (folder / "files").mkdir()
    for i in range(30):
        write(f"files/{i:02}.txt", "".join(f"{line}\n" for line in lines[3 * i : 3 * i + 3]))
    write("cut.txt", "".join(f"{line}\n" for line in make_lines(120, "cut")))


# --- labelled sets --------------------------------------------------------------------------------------------------

TERMS = [f"{first} {second}" for first in ("heart", "blood", "cell") for second in ("disease", "test", "study")]
FAMILIES = (
    *("ner", "nested_ner", "relation", "relation_extraction", "classification", "multilabel", "regression"),
    *("qa", "multiple_choice", "normalization"),
)
SIZES = {"train": 48, "dev": 16, "test": 16}


def make_set(folder: Path, family: str) -> None:
    """Write a set whose labels follow from single words, in a layout of its family."""
    folder.mkdir(parents=True)
    for split, size in SIZES.items():
        drawn = random.Random(f"{family} {split}")
        examples = [make_example(family, i, drawn) for i in range(size)]
        if family == "ner":
            lines = ["".join(f"{word}\t{tag}\n" for word, tag in example["pairs"]) for example in examples]
            (folder / f"{split}.tsv").write_text("\n".join(lines), encoding="utf-8")
        elif family == "qa":
            groups = [{"title": "t", "paragraphs": examples}]
            (folder / f"{split}.json").write_text(json.dumps({"version": "2", "data": groups}), encoding="utf-8")
        else:
            lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "catalogue.txt").write_text("".join(f"{term}\n" for term in TERMS), encoding="utf-8")
    predicates = {"subject_type": "Drug", "predicate": "treats", "object_type": "Organ"}
    (folder / "schema.jsonl").write_text(json.dumps(predicates) + "\n", encoding="utf-8")


def make_example(family: str, i: int, drawn: random.Random) -> dict[str, Any]:
    """Make a row of a set as its file has it."""
    words = drawn.choices(WORDS[:60], k=drawn.randint(3, 7))
    text, is_first = " ".join(words), drawn.random() < 0.5
    full = f"{text} the drug and heart disease"
    drug, heart = len(text) + 5, len(text) + 14
    entities = [
        {"start_idx": drug, "end_idx": drug + 4, "type": "Drug", "entity": "drug"},
        {"start_idx": heart, "end_idx": heart + 5, "type": "Organ", "entity": "heart"},
        {"start_idx": heart, "end_idx": len(full), "type": "Disease", "entity": "heart disease"},
    ]
    mark = "cat" if is_first else "wind"
    match family:
        case "ner":
            pairs = [(word, "O") for word in words]
            own = [("heart", "B-Disease"), ("disease", "I-Disease")] if is_first else [("drug", "B-Drug")]
            place = drawn.randrange(len(words))
            return {"pairs": [*pairs[:place], *own, *pairs[place:]]}
        case "nested_ner":
            return {"id": i, "text": full, "entities": entities}
        case "relation":
            verb = "treats" if is_first else "and"
            marked = f"{text} << drug >> {verb} the [[ heart ]] disease"
            return {"id": i, "text": marked, "label": "treats" if is_first else "none"}
        case "relation_extraction":
            verb = "treats" if is_first else "and"
            triple = {"subject": "drug", "subject_type": "Drug", "predicate": "treats", "object": "heart"}
            triples = [{**triple, "object_type": "Organ"}] if is_first else []
            return {"id": i, "text": f"{text} the drug {verb} the heart disease", "spo_list": triples}
        case "classification":
            pair = {"pair": "the sun"} if i % 3 else {}
            return {"id": i, "text": f"{text} {mark}", **pair, "label": "animal" if is_first else "weather"}
        case "multilabel":
            labels = ["animal", "short"] if is_first else (["short"] if i % 2 else ["weather"])
            return {"id": i, "text": f"{text} {mark} {'' if 'short' in labels else 'and the rain'}", "labels": labels}
        case "regression":
            return {"id": i, "text": f"{text} {mark}", "value": 4.0 * is_first + len(words) / 8}
        case "qa":
            context = f"{text} the dog is in the {mark} {text}"
            start = context.index(mark)
            answers = [{"text": mark, "answer_start": start}] if i % 4 else []
            question = {"id": str(i), "question": "where is the dog", "answers": answers}
            return {"context": context, "qas": [{**question, "is_impossible": not answers}]}
        case "multiple_choice":
            options = {
                f"ending{j}": option for j, option in enumerate(drawn.sample(["cat", "heart disease", "sun"], 3))
            }
            answer = [*options.values()].index("sun")
            return {"id": i, "sent1": text, "sent2": "the", **options, "ending3": "road", "label": answer}
        case _:
            term = "heart test" if i % 4 else "blood disease"  # which a small model learns
            return {"id": i, "text": f"{text} {' of '.join(term.split())}", "terms": term}
