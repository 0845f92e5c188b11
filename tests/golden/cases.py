"""What the golden files hold: commands, and what comes of them. Every function works in a folder of made inputs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import adapter
import made_inputs
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

Records = dict[str, Any]


def digest(value: Any, length: int = 16) -> str:
    """Hash plain values that were copied or counted, never computed."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, default=str).encode()).hexdigest()[:length]


# --- rows -----------------------------------------------------------------------------------------------------------

READERS = {
    "text by line": "lines.txt",
    "text, gzipped": "lines.txt.gz",
    "text with a byte order mark and CRLF": "bom.txt",
    "text by blank line": "paragraphs.txt --prepare.document blank_line",
    "text by file": "files --prepare.document file --prepare.held_out_by file",
    "several tasks, held out by document": "lines.txt --prepare.shard_bytes 1024 --prepare.held_out_by document",
    "a glob, and a file twice": "texts/files/*[05].txt,texts/lines.txt,texts/lines.txt --prepare.min_document_chars 50",
    "long documents are cut": "paragraphs.txt --prepare.document blank_line --prepare.max_document_chars 90",
    "documents are not joined": "lines.txt --prepare.cross_documents false",
    "packed rows": "lines.txt --prepare.packed true",
    "JSONL": "records.jsonl",
    "JSONL, gzipped": "records.jsonl.gz",
    "JSONL in ranges": "records.jsonl --prepare.shard_bytes 2048",
    "CSV, another column": "records.csv --prepare.field title",
    "CSV": "records.csv",
    "TSV": "records.tsv",
    "Parquet": "records.parquet",
    "Arrow": "records.arrow",
    "a saved dataset": "saved",
    "two texts a row": "records.parquet --prepare.pair title,text --objective.kind infonce",
}
VOCABULARIES = {
    "bert": "WordPiece, uncased",
    "cased": "WordPiece, cased",
    "roberta": "byte-level BPE",
    "camembert": "unigram",
}
NEW_WORDS = {
    "": "",
    ", words of a file": " --vocab.words words.txt",
    ", learned words": " --vocab.size 14 --vocab.min_frequency 3",
    ", whole words only": " --vocab.size 9 --vocab.min_frequency 3 --vocab.whole_words true",
}


QUICK_ROWS = (
    *("text by line", "text by blank line", "several tasks, held out by document", "packed rows", "JSONL in ranges"),
    *("CSV", "Parquet", "two texts a row", "WordPiece, uncased", "WordPiece, uncased, learned words", "unigram"),
    *("byte-level BPE, words of a file", "Han text, words of jieba", "no base, WordPiece learned"),
)
"""Corpora of the default tier: a reader of each kind, a vocabulary of each family."""


def list_rows() -> dict[str, str]:
    """Return the commands that prepare corpora, by name."""
    found = {name: f"--base bases/bert --corpus texts/{given}" for name, given in READERS.items()}
    for base, family in VOCABULARIES.items():
        for words, options in NEW_WORDS.items():
            if family != "unigram" or not options:
                found[f"{family}{words}"] = f"--base bases/{base} --corpus texts/lines.txt{options}"
    found["Han text, words of jieba"] = "--base bases/cased --corpus texts/han.txt"
    found["Han text, words of a character"] = f"{found['Han text, words of jieba']} --prepare.chinese_words false"
    found["no base, WordPiece learned"] = "--preset bert --base none --vocab.size 160 --corpus texts/lines.txt"
    return {
        name.replace("texts/texts/", "texts/"): f"prepare {given.replace('texts/texts/', 'texts/')}"
        for name, given in found.items()
    }


def make_rows(folder: Path, *, quick: bool) -> Records:
    """Prepare corpora; hash their rows by column."""
    records: Records = {}
    for i, (name, command) in enumerate(list_rows().items()):
        if quick and name not in QUICK_ROWS:
            continue
        places = f"--prepare.held_out_frac 0.1 --train.seq_length 32 --run.dir prepared --run.name c{i}"
        ended = adapter.call(f"{command} {places} --prepare.cache_dir prepared/cache{i}")
        assert ended.code == 0, ended.err
        rows = adapter.read_rows(folder / f"prepared/cache{i}")
        record: Records = {"command": command, "documents": rows["documents"], "dropped": rows["dropped"]}
        for split in ("train", "held_out"):
            record[split] = {column: f"{len(values)} rows, {digest(values)}" for column, values in rows[split]}
        if (folder / f"prepared/c{i}/tokenizer").is_dir():
            entries = adapter.read_entries(folder / f"prepared/c{i}")
            record["vocabulary"] = f"{len(entries)} entries, {digest(entries)}"
        records[name] = record
    return records


# --- batches and masks ----------------------------------------------------------------------------------------------

_PARTS = (
    "--mixture.parts '{more: {corpus: texts/more.txt, weight: {0: 1, 0.5: 3}}, "
    "kept: {corpus: texts/cut.txt, keep: true}}'"
)
_PLAIN = "pretrain af --base bases/bert --corpus texts/lines.txt --replay.corpus none --train.seq_length 32"
_MIXED = (
    "pretrain af --base bases/bert --corpus texts/lines.txt --replay.corpus texts/general.txt --replay.frac 0.3 "
    f"--train.seq_length 32 --train.max_steps 20 --vocab.words words.txt --objective.keep kl {_PARTS}"
)
BATCHES = {
    "whole words": _PLAIN,
    "whole words, another seed, several shards": f"{_PLAIN} --seed 7 --prepare.shard_bytes 1024",
    "single tokens": f"{_PLAIN} --objective.whole_word false",
    "other shares": f"{_PLAIN} --objective.mask_prob 0.4 --objective.mask_token_frac 0.5 "
    "--objective.random_token_frac 0.5",
    "left to right": f"{_PLAIN} --objective.kind causal",
    "packed": f"{_PLAIN} --prepare.packed true",
    "Han words": _PLAIN.replace("bert", "cased").replace("lines", "han"),
    "next sentences": _PLAIN.replace("lines", "paragraphs")
    + " --prepare.document blank_line --objective.next_sentence true --method.heads 0 --method.ffn_units 8",
    "a mixture with new words": _MIXED,
    "a mixture, general text learned": _MIXED.replace("kl", "replay"),
}
SEVERAL_RANKS = "whole words", "next sentences", "a mixture with new words"
QUICK_BATCHES = "whole words", "packed", "next sentences", "a mixture with new words"
NUM_BATCHES, WORLD_SIZES = 20, (1, 2, 4)


def make_batches(folder: Path, quick: bool) -> Records:
    """Read the first global batches with several numbers of ranks; hash their rows, and their masks."""
    records: Records = {}
    for i, (name, command) in enumerate(BATCHES.items()):
        if quick and name not in QUICK_BATCHES:
            continue
        options = f"--prepare.held_out_frac 0.1 --train.global_batch_size 8 --run.dir batches --run.name b{i}"
        sizes = WORLD_SIZES if name in SEVERAL_RANKS else WORLD_SIZES[:1]
        found = [adapter.read_batches(f"{command} {options}", size, NUM_BATCHES) for size in sizes]
        assert all(batches == found[0] for batches in found), f"{name}: the global batch depends on the number of ranks"
        masks = [[{**row, "ids": None} for row in batch] for batch in found[0]]
        records[name] = {
            "command": command,
            "rows": " ".join(digest([row["ids"] for row in batch], 8) for batch in found[0]),
            "masks": " ".join(digest(batch, 8) for batch in masks),
            "predicted": " ".join(str(sum(len(row["predicts"]) for row in batch)) for batch in masks),
        }
    return records


# --- losses ---------------------------------------------------------------------------------------------------------

_SIZES0 = "--method.heads 0 --method.ffn_units 0"
_KEPT = "--replay.corpus texts/general.txt --objective.keep"
LOSSES = {
    "af": "af --replay.corpus none --method.heads 1 --method.ffn_units 10 --train.dropout 0.1",
    "af, word shifts, kept to the base": f"af {_KEPT} kl --method.heads 1 --method.ffn_units 10",
    "af, mixture of three": f"af {_KEPT} replay --method.heads 1 --method.ffn_units 6 --method.word_rows 40 {_PARTS}",
    "fl_tuning, left to right": f"af --replay.corpus none {_SIZES0} --method.ffn_units 10 --objective.kind causal",
    "bottleneck": "bottleneck --method.bottleneck_size 6",
    "second bottleneck after the first": "bottleneck --method.bottleneck_size 5 --method.adapter second "
    "--init_from trained/bottleneck",
    "exbert, pairs, new words": "exbert --vocab.size 0 --vocab.words words.txt --method.module_hidden_size 12 "
    "--method.module_ffn_size 20 --objective.next_sentence true --corpus texts/paragraphs.txt "
    "--prepare.document blank_line",
    "lora": "lora --base bases/roberta --method.lora_rank 3 --method.lora_targets query,value,output",
    "full, no base": "bert --base none --vocab.size 160 --shape.num_hidden_layers 2 --shape.hidden_size 32 "
    "--shape.intermediate_size 64 --shape.max_position_embeddings 64",
    "top layers, unigram": f"bert --base bases/camembert --method.trains top_layers --method.top_layers 1 {_SIZES0} "
    "--method.name top",
    "layer norms, electra": f"bert --base bases/electra --method.trains layer_norms {_SIZES0} --method.name norms",
    "biases, distilbert": f"bert --base bases/distilbert --method.trains biases {_SIZES0} --method.name biases",
    "bottleneck, modernbert, packed": "bottleneck --base bases/modernbert --method.bottleneck_size 4 "
    "--prepare.packed true --train.long_seq_length 48 --train.long_frac 0.5",
    "af, contrast": "af --replay.corpus none --method.heads 1 --method.ffn_units 8 --objective.kind infonce "
    "--objective.group_rows 4 --corpus texts/records.parquet --prepare.pair title,text",
}
SLOW_LOSSES = (
    *("fl_tuning, left to right", "second bottleneck after the first", "top layers, unigram", "layer norms, electra"),
    "biases, distilbert",
)
"""Those that the default tier leaves out: nothing else goes on from them."""
IN_CLUSTER = ("bottleneck", "exbert, pairs, new words", "af, mixture of three")
"""Those that the tier `slow` also trains on Ray Train."""


def name_run(name: str) -> str:
    """Return the name of a run's folder."""
    return name.replace(",", "").replace(" ", "-")


def write_loss_command(name: str) -> str:
    """Return the whole command of a run: six steps, in fp32 on a CPU."""
    command = f"pretrain {LOSSES[name]}"
    command += "" if "--base" in command else " --base bases/bert"
    command += "" if "--corpus" in command.replace("--replay.corpus", "") else " --corpus texts/lines.txt"
    command += "" if "dropout" in command else " --train.dropout 0"
    length = 64 if "pairs" in name else 32
    return (
        f"{command} --prepare.held_out_frac 0.1 --prepare.cache_dir trained/.corpora --train.seq_length {length} "
        "--train.global_batch_size 8 --train.micro_batch_size 4 --train.max_steps 6 --train.evaluate_every 100 "
        "--train.eval_rows 8 --train.general_probe probe.txt --optim.lr 3e-3 --optim.eps 1e-6 --optim.warmup_steps 2 "
        "--seed 5 --engine.precision fp32 --scale.use_gpu false --run.trackers [] --run.dir trained"
    )


def list_losses(quick: bool) -> list[str]:
    """Return the names of the runs of a tier."""
    return [name for name in LOSSES if not quick or name not in SLOW_LOSSES]


def make_losses(folder: Path, *, quick: bool) -> Records:
    """Train methods for six steps; keep what each records."""
    records: Records = {}
    for name in list_losses(quick):
        ended = adapter.train(f"{write_loss_command(name)} --run.name {name_run(name)}")
        assert ended.code == 0, f"{name}: {ended.err}"
        figures = adapter.read_figures(folder / "trained" / name_run(name))
        records[name] = {"command": f"pretrain {LOSSES[name]}", **figures}
    return records


# --- exports --------------------------------------------------------------------------------------------------------

OTHER_FORMATS = {
    "lora, for peft": "export --run trained/lora --format peft --output exported/peft",
    "bottleneck, for AdapterHub": "export --run trained/bottleneck --format adapterhub --output exported/adapterhub",
    "bottleneck, in bfloat16": "export --run trained/bottleneck --dtype bfloat16 --output exported/bfloat16",
}


def make_exports(folder: Path, *, quick: bool) -> Records:
    """Describe what every run exported: names, shapes and values of tensors, and logits as transformers has them."""
    kept = {
        _hash_tensor(tensor) for path in folder.glob("bases/*/*.safetensors") for tensor in load_file(path).values()
    }
    records = {}
    for name in list_losses(quick):
        export = folder / "trained" / name_run(name) / "export"
        records[name] = {**describe_tensors(export / "model.safetensors", kept), "logits": compute_logits(export)}
    for name, command in OTHER_FORMATS.items():
        ended = adapter.call(command)
        assert ended.code == 0, ended.err
        tensors = sorted((folder / command.split()[-1]).rglob("*.safetensors"))
        records[name] = {"command": command, **{path.name: describe_tensors(path, kept) for path in tensors}}
    return records


def _hash_tensor(tensor: torch.Tensor) -> str:
    return hashlib.sha256(f"{list(tensor.shape)}".encode() + tensor.float().numpy().tobytes()).hexdigest()


def describe_tensors(path: Path, kept: set[str]) -> Records:
    """Hash the tensors that are a base's bit for bit; of the others keep a few figures."""
    tensors = load_file(path)
    copied = {name: _hash_tensor(tensor) for name, tensor in sorted(tensors.items()) if _hash_tensor(tensor) in kept}
    own = {name: tensor.double() for name, tensor in sorted(tensors.items()) if name not in copied}
    return {
        "copied": f"{len(copied)} tensors, {digest(copied)}",
        "own": {
            name: [list(tensor.shape), tensor.mean().item(), tensor.abs().mean().item()] for name, tensor in own.items()
        },
    }


@torch.no_grad()
def compute_logits(export: Path) -> list[float]:
    """Return some logits of an exported model on two rows, one of them padded."""
    model = AutoModelForMaskedLM.from_pretrained(export, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    lines = made_inputs.make_lines(2, "logits")
    batch = tokenizer([lines[0], lines[1][:30]], padding=True, return_tensors="pt")
    batch["input_ids"][0, 3] = tokenizer.mask_token_id
    logits = model(**batch).logits
    return [*logits[0, 3, 5:45:8].tolist(), *logits[1, 2, 5:45:8].tolist(), logits[0].abs().mean().item()]


# --- tasks ----------------------------------------------------------------------------------------------------------

GRID = "--grid.epochs 8 --grid.lr 5e-3 --grid.batch_size 8"
LONGER = GRID.replace("epochs 8", "epochs 20")
TUNED = {"relation_extraction": LONGER, "regression": LONGER, "qa": LONGER, "multiple_choice": LONGER}
TUNED |= {"normalization": "--grid.epochs 6 --grid.lr 3e-3 --grid.batch_size 32"}
RAW: dict[str, list[Records]] = {
    "relation": [{"text": "the << drug >> treats the [[ heart ]] disease"}],
    "qa": [{"question": "where is the dog", "context": "the dog is at home and the cat is out " * 6}],
    "multiple_choice": [{"context": "the dog", "options": ["run", "sun", "read"]}],
}
TEXTS = [{"text": "the cat and the drug heart disease"}, {"text": "water and wind " * 20, "id": 5}, {"note": 1}]


def make_tasks(folder: Path) -> Records:
    """Fine-tune on a set of each family, then predict rows of a file and score a split with the exported model."""
    records: Records = {}
    for family in made_inputs.FAMILIES:
        command = f"finetune --task {family} --data sets/{family} --model bases/bert {TUNED.get(family, GRID)}"
        ended = adapter.call(
            f"{command} --grid.restarts 1 --optim.dropout 0 --labelled.max_length 40 --labelled.stride 10 "
            f"--num_resamples 100 --engine.precision fp32 --optim.eps 1e-6 "
            f"--scale.use_gpu false --scale.cpus 1 --run.dir tuned --run.name {family}"
        )
        assert ended.code == 0, f"{family}: {ended.err}"
        summary = json.loads((folder / f"tuned/{family}/summary.json").read_text(encoding="utf-8"))
        scores = {split: {k: v for k, v in summary[split].items() if k != "intervals"} for split in ("dev", "test")}
        predictions = (folder / f"tuned/{family}/predictions.jsonl").read_text(encoding="utf-8").splitlines()
        records[family] = {
            "command": command,
            **scores,
            "predictions": [adapter.simplify(json.loads(line)["prediction"]) for line in predictions[-8:]],
            **predict_rows(folder, family),
        }
    return records


def predict_rows(folder: Path, family: str) -> Records:
    """Predict rows of a file as JSONL, and a labelled split as Parquet."""
    rows = [*RAW.get(family, TEXTS[:1]), {**TEXTS[1], **RAW.get(family, [{}])[0]}, *TEXTS[2:], {"text": " "}]
    (folder / f"rows-{family}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = f"predict --model tuned/{family} --scale.use_gpu false"
    found = adapter.predict(f"{common} --input rows-{family}.jsonl --output found/{family} --format jsonl")
    (part,) = (found / "predictions").iterdir()
    malformed = json.loads((found / "malformed.jsonl").read_text(encoding="utf-8").splitlines()[0])
    scored = adapter.predict(f"{common} --task {family} --input sets/{family} --output scored/{family} --block_rows 5")
    scores = json.loads((scored / "scores.json").read_text(encoding="utf-8"))
    ids = [row["id"] for path in sorted((scored / "predictions").iterdir()) for row in pq.read_table(path).to_pylist()]
    return {
        "rows": [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()],
        "malformed": [malformed["line"], malformed["reason"]],
        "scored": {"value": scores["value"], "metric": scores["metric"], "ids": digest(ids)},
    }


ENCODED = {
    "": "--labelled.max_length 64",
    ", short rows": "--labelled.max_length 24 --labelled.stride 6",
    ", shortest rows": "--labelled.max_length 16 --labelled.stride 3",
}


def make_encoded(folder: Path, *, quick: bool) -> Records:
    """Encode a set of every family with every tokenizer; rows that are too short for a text make windows, or cut it.

    Quickly: the shorter rows with one tokenizer alone.
    """
    records: Records = {}
    for family in made_inputs.FAMILIES:
        lengths = ENCODED | (
            {", context": f"{ENCODED[', short rows']} --labelled.context true"} if family == "ner" else {}
        )
        for name, options in lengths.items():
            for base in ("bert",) if quick and name else ("bert", "roberta", "camembert"):
                command = f"finetune --task {family} --data sets/{family} --model bases/{base} {options}"
                found = adapter.encode_set(command)
                records[f"{family}{name}, {base}"] = {
                    part: rows if part == "notes" else [len(rows), digest(rows), rows[0]]
                    for part, rows in found.items()
                }
    return records


# --- what is measured, kept and embedded ----------------------------------------------------------------------------


def make_measures(folder: Path) -> Records:
    """Compare models on general text and in a collection, keep a run in a bank, fill masks, make vectors."""
    _write_collection(folder / "collection")
    models = "base=bases/bert,bottleneck=trained/bottleneck"
    entries = AutoTokenizer.from_pretrained("bases/bert").get_vocab()
    likely = [word for word in made_inputs.WORDS if entries[word] % 16 == 0]  # what the bases predict in a mask's place
    lines = [" ".join(likely[i % 5 :] + likely[: i % 7]) + f" {word}.\n" for i, word in enumerate(made_inputs.WORDS)]
    (folder / "likely.txt").write_text("".join(lines), encoding="utf-8")
    records: Records = {}
    for name, command in {
        "forgetting": f"forgetting --models {models} --corpus likely.txt --num_texts 40 --output forgetting",
        "retrieval": f"evaluate_retrieval --models {models} --data collection --output retrieval",
    }.items():
        ended = adapter.call(command)
        assert ended.code == 0, ended.err
        results = json.loads((folder / name / "results.json").read_text(encoding="utf-8"))
        records[name] = {"command": command, **adapter.list_measures(results)}
    for name in ("bottleneck", "af"):
        ended = adapter.call(f"bank --bank bank --add trained/{name} --name {name}")
        assert ended.code == 0, ended.err
    (folder / "masked.txt").write_text("the [MASK] and the heart [MASK] .\nno mask\n\n", encoding="utf-8")
    for model in ("bank:bottleneck", "bank:af", "trained/af", "trained/lora", "bases/camembert"):
        command = f"predict --model {model} --input masked.txt --top_k 2 --format jsonl --keep_text true"
        found = adapter.predict(f"{command} --scale.use_gpu false --output filled/{name_run(model.replace('/', ' '))}")
        (part,) = (found / "predictions").iterdir()
        rows = [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
        records[model] = {"command": command, "rows": rows}
    return records


def _write_collection(folder: Path) -> None:
    """Write a collection in BEIR's layout: the query of a document is its second half."""
    (folder / "qrels").mkdir(parents=True)
    lines = made_inputs.make_lines(24, "collection")
    documents = [{"_id": f"d{i}", "title": "", "text": line} for i, line in enumerate(lines)]
    queries = [{"_id": f"q{i}", "text": line[len(line) // 2 :]} for i, line in enumerate(lines[:8])]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(8))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", encoding="utf-8")


# --- mistakes -------------------------------------------------------------------------------------------------------

_BERT = "--base bases/bert --corpus texts/lines.txt"
_RESUMED = f"{write_loss_command('bottleneck')} --run.name bottleneck"
MISTAKES = f"""
pretrin af
pretrain aff
pretrain
--seed 1 pretrain af
presets show nope
pretrain af --train.max_step 10
pretrain af --train.max_steps 1.5
pretrain af --train.max_steps
pretrain af --optim.lr nan
pretrain af --optim.on_non_finite ignore
pretrain af --dry_run perhaps
pretrain af --corpus texts/lines.txt texts/more.txt --seed 1
pretrain af --train.global_batch_size 30 --scale.num_workers 31
pretrain af --engine.offload true
pretrain af --method.layers 9-3
pretrain af --method.name lora
pretrain af --replay.corpus none --method.heads 0 --method.ffn_units 0
pretrain af --objective.mask_token_frac 0.9 --objective.random_token_frac 0.2
pretrain af --mixture.parts '{{more: {{weight: 1}}}}'
pretrain af --preset nope
pretrain af --config broken/none.yaml
pretrain af --config broken/key.yaml
pretrain af --config broken/syntax.yaml
pretrain af --config broken/type.yaml
pretrain af --config broken/twice.yaml
pretrain lora --method.lora_rank 4 --method.lora_targets keys
pretrain bert --base none --vocab.size 300 --shape.hidden_size 30
pretrain af --base bases/bert --corpus no/such.txt
pretrain af --base bases/bert --corpus broken/empty.txt
pretrain af --base bases/bert --corpus broken/latin.txt
pretrain af --base bases/bert --corpus broken/array.jsonl
pretrain af --base bases/bert --corpus broken/cut.jsonl
pretrain af --base bases/bert --corpus broken/cut.parquet
pretrain af --base bases/bert --corpus broken/file.pdf
pretrain af --base bases/bert --corpus texts/records.jsonl --prepare.field body
pretrain af --base bases/bert --corpus texts/lines.txt --objective.kind infonce --replay.corpus none --prepare.pair a,b
pretrain af --base ./bases/none
pretrain af --base broken/config
pretrain af --base broken/tensors
pretrain af {_BERT} --train.seq_length 512
pretrain af {_BERT} --method.module_hidden_size 13 --method.module_ffn_size 16
prepare {_BERT} --prepare.shard_bytes 10
vocab {_BERT}
pretrain exbert {_BERT} --vocab.words words.txt --vocab.size 5
pretrain exbert {_BERT} --vocab.size 0 --vocab.words broken/known.txt
pretrain exbert {_BERT} --vocab.size 0 --vocab.words no/words.txt
pretrain af {_BERT} --run.name a/b
pretrain af {_BERT} --run.dir probe.txt
pretrain af {_BERT} --init_from trained/none
pretrain af {_BERT} --init_from trained/lora
{_RESUMED.replace("--seed 5", "--seed 6")}
{_RESUMED.replace("max_steps 6", "max_steps 9")}
{_RESUMED.replace("lines.txt", "more.txt")}
pretrain bottleneck {_BERT} --init_from trained/bottleneck --method.bottleneck_size 7 --run.name again
finetune --task nerr --data sets/ner
finetune --task ner --data ./no/such --model bases/bert
finetune --task ner --data sets/ner --model ./bases/none
finetune --task classification --data sets/ner --model bases/bert
finetune --task ner --data broken/dirty --model bases/bert --labelled.strict true
finetune --task ner --data broken/alone --model bases/bert
finetune --task broken/set.yaml --data sets/ner --model bases/bert
finetune --task ner --data sets/ner --model bases/bert --grid.lr 1e-4,0.0001
finetune --task ner --data sets/ner --model bases/bert --grid.lr fast
finetune --task ner --data sets/ner --model bases/bert --method.trains extensions --method.word_rows 9
predict --model bases/bert --input no/such --output out
predict --model bases/bert --input texts/records.parquet --field body --output out
predict --model bases/bert --task ner --input sets/ner --output out
predict --model bank:nobody --input texts/lines.txt --output out
predict --model bases/bert --input texts/lines.txt
embed --model bases/bert --input texts/lines.txt --output out --layers 9-3
bank --bank nobank
bank --bank bank --add trained/lora --name lora
bank --bank bank --add trained/af --name 'a b'
bank --bank bank --remove nobody
export --run texts
export --run trained/af --format peft
export --run trained/af --format adapterhub
export --run trained/af --output texts
export --run trained/af --push ORG
compare --seconds 5 --methods af,nope
compare --seconds 0
compare --tokens 100 --budgets 0.1,0.1
compare_runs --runs trained/af,texts
sweep --train.max_steps 5
sweep --space '{{method.headz: {{choice: [0, 1]}}}}'
sweep --search.scheduler asha --search.rungs 1
ablate --study spans
forgetting --models bases/bert,bases/bert --corpus texts/lines.txt
evaluate_retrieval --models bases/bert --data texts
serve --bank bank --model bases/bert
serve --bank nobank --dry_run true
serve --model bases/bert --port 0
""".strip().splitlines()


def make_mistakes(folder: Path) -> Records:
    """Return the sentence that each wrong command gets; it ends with exit code 2 and nothing is printed beside it."""
    _break_things(folder / "broken")
    records: Records = {}
    for command in MISTAKES:
        ended = adapter.call(command)
        assert ended.code == 2 and ended.out == "" and ended.err.startswith("error: "), f"{command}: {ended}"
        sentence = ended.err.removeprefix("error: ").strip()
        records[command] = sentence.replace(str(folder), "FOLDER").replace(adapter.PACKAGE, "PACKAGE")
    return records


def _break_things(folder: Path) -> None:
    folder.mkdir()
    for name, content in {
        "key.yaml": "train:\n  max_stepz: 3\n",
        "syntax.yaml": "train:\n  {max_steps: 3\n",
        "type.yaml": "train:\n  max_steps: many\n",
        "twice.yaml": "seed: 1\nseed: 2\n",
        "set.yaml": "task: ner\ncolums: {}\n",
        "empty.txt": "",
        "known.txt": "heart\nblood\n",
        "latin.txt": "Die Prüfung der Größe führt zu höheren Werten über Jahre.\n" * 30,
        "array.jsonl": json.dumps([{"text": "One record of text that is long enough."}] * 3, indent=1),
        "cut.jsonl": '{"text": "A record of text that is long enough."}\n' * 2 + '{"text": "cut\n',
        "file.pdf": "%PDF-1.7",
        "dirty/train.tsv": "the\tO\nheart\tI-\n\ndrug\tB-Drug\n",
        "dirty/dev.tsv": "drug\tB-Drug\n",
        "alone/train.tsv": "drug\tB-Drug\n",
    }.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode("latin-1" if name == "latin.txt" else "utf-8"))
    (folder / "cut.parquet").write_bytes(Path("texts/records.parquet").read_bytes()[:-40])
    for name, file in (("config", "config.json"), ("tensors", "model.safetensors")):
        (folder / name).mkdir()
        for source in Path("bases/bert").iterdir():
            content = source.read_bytes()
            (folder / name / source.name).write_bytes(content[: len(content) // 2] if source.name == file else content)
