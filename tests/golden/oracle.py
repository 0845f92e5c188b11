"""Asks two checkouts the same three hundred questions, and lists the answers that differ.

    python tests/golden/oracle.py OLD_CHECKOUT NEW_CHECKOUT [--number 300] [--seed 0]

Questions are command lines, right and wrong, with YAML files; corpora of every format, with malformed rows; labelled
sets, dirty ones too; inputs of predictions. Each checkout answers in two processes through its own adapter.py, or the
one beside this file where it has none. Nothing is trained. Exit code 1: there are differences.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Question = dict[str, Any]
NAMES = {
    "--config_path": "--preset",
    "--config": "--preset",
    "method.domain": "method.adapter",
    "method.active_domains": "method.active_adapters",
}
"""Old names of options in sentences, and their new ones."""
OPTIONS = """
train.max_steps 10 1e2 0 -5 1.5 abc|train.global_batch_size 8 30 0|train.micro_batch_size 2 7 -1
train.seq_length 64 4 abc|train.dropout 0.2 1 -1|train.epochs 2 nan|train.max_seconds 5 inf
train.long_seq_length 256 64|train.long_frac 0.2 2|train.evaluate_every 5 0|optim.lr 1e-3 0 nan fast|optim.beta1 0.8 1
optim.schedule cosine wsd sine|optim.warmup_steps 3 -1|optim.decay_steps 900 2|optim.on_non_finite skip ignore
engine.zero_stage 1 7|engine.precision bf16 fp16|seed 3 -1 x|engine.offload true maybe|engine.base_dtype bf16 fp8
scale.num_workers 2 0 1000|scale.use_gpu false maybe|method.heads 2 -1|method.ffn_units 64 1.5|method.layers 0-1 9-3 x
method.lora_rank 4 -2|method.lora_targets query,key keys|method.bottleneck_size 8 -1
method.bottleneck_place attention middle|method.trains all adapter nothing|method.adapter d 'a b'
method.trainable_budget 0.1 1.5|method.word_rows 100 -1|method.word_init subword_mean mean|method.name mine lora a/b
objective.kind causal tsdae infonce left_to_right|objective.mask_prob 0.3 0 2|objective.random_token_frac 0.1 0.9
objective.whole_word false 2|objective.next_sentence true|objective.keep replay none all|objective.keep_weight 2 0
prepare.document file paragraph|prepare.held_out_frac 0.1 0.9|prepare.min_document_chars 5 0
prepare.shard_bytes 4096 1|prepare.pair a,b a a,a|prepare.held_out_by file row|vocab.size 100 -1
vocab.min_frequency 2 0|run.name x .. a/b|run.keep_checkpoints 3 0|run.dir out s3://b
replay.corpus none self texts/general.txt|replay.frac 0.5 1 0|dry_run true perhaps|mixture.weight 2 0
mixture.parts '{m: {corpus: a}}' '{m: {weight: 1}}' '{general: {corpus: a}}' '[]'|shape.hidden_size 64 30
grid.lr 1e-4,3e-5 1e-4,0.0001 fast|grid.batch_size 8,16 1.5|grid.epochs 2,3 0|grid.restarts 2 0|task ner qa nope
data sets/ner no/such|model bases/bert|labelled.max_length 64 4|labelled.stride 16 100|features.layers 1-2 9-3
num_resamples 200 1|optim.head_lr 1e-3 -1|optim.top_layers 2|methods af,full af,af nope|budget 0.2 2
budgets 0.1,0.2 0.1,0.1|rates 1e-3,3e-3 1e-3 x|seeds 2 0|seconds 5 0|tokens 1000 -1|tasks ner ner,qa|search.trials 3 0
search.rungs 2 0|search.objectives f1 f1,trainable f2|search.scheduler asha hyperband
space '{method.heads: {choice: [0, 1]}}' '{}' 3|runs runs/a,runs/b ''|models bases/bert,x=bases/cased ''
corpus texts/lines.txt ''|mask_frac 0.3 2|study sigma size nothing|sigmas 1e-3,1e-2 2|sizes 4,8 0 4,4
top_layers 1,2 all x|input texts/lines.txt ''|output out ''|field body ''|top_k 3 0|pooling cls mean max
format jsonl peft zip|dtype float16 int8|push ORG/NAME ORG|bank bank ''|add runs/a|name x 'a b'|host '' ::1
port 8001 0|batch.rows 8 0|limit.seconds 5 -1|block_rows 10 0|max_length 64 2|layers 1,2 9-3|split dev all
"""
VERBS = (
    *("pretrain af", "pretrain bottleneck", "pretrain exbert", "pretrain lora", "pretrain bert", "prepare", "vocab"),
    *("finetune", "sweep", "ablate", "compare", "compare_runs", "forgetting", "evaluate_retrieval", "export", "bank"),
    *("predict", "embed", "serve"),
)
NEEDED = {"predict": "--input texts/lines.txt --output out", "embed": "--input texts/lines.txt --output out"}
NEEDED |= {"compare": "--seconds 5", "export": "--run texts", "bank": "--bank bank", "serve": "--model bases/bert"}
NEEDED |= {"compare_runs": "--runs texts,sets", "forgetting": "--models bases/bert --corpus texts/lines.txt"}
NEEDED |= {
    "evaluate_retrieval": "--models bases/bert --data texts",
    "ablate": "--study size --task ner --data sets/ner",
}
PREFIXES = {"pretrain": "train optim engine scale method objective prepare vocab run replay mixture seed dry_run shape"}
PREFIXES |= {"prepare": "prepare train vocab run dry_run", "vocab": "vocab prepare run", "finetune": ""}


# --- questions ------------------------------------------------------------------------------------------------------


def make_questions(folder: Path, number: int, seed: int) -> Iterator[Question]:
    """Write the files of all questions into a folder of inputs, and yield them."""
    makers = [ask_command] * 5 + [ask_corpus] * 3 + [ask_set] * 4 + [ask_input] * 2
    for i in range(number):
        drawn, place = random.Random(f"{seed} {i}"), folder / f"q{i}"
        place.mkdir()
        yield {"number": i, **makers[i % len(makers)](place, drawn)}


def list_values() -> dict[str, list[str]]:
    """Return the values that are tried, by option."""
    entries = [re.findall(r"'[^']*'|\S+", each) for each in OPTIONS.replace("\n", "|").split("|") if each.strip()]
    return {name: values for name, *values in entries}


def ask_command(place: Path, drawn: random.Random) -> Question:
    """A verb with some options, one of them perhaps misspelt, perhaps in a file or on a preset."""
    values, verb = list_values(), drawn.choice(VERBS)
    first = PREFIXES.get(verb.split()[0], "").split()
    names = [each for each in values if not first or each.split(".")[0] in first]
    chosen = {
        name: drawn.choice([*values[name][:1] * 4, *values[name]]) for name in drawn.sample(names, drawn.randint(0, 3))
    }
    if drawn.random() < 0.1 and chosen:
        name = min(chosen)
        chosen[name[:-1] + "z"] = chosen.pop(name)
    words = [verb, NEEDED.get(verb, "")]
    if drawn.random() < 0.3:
        nested = [f"{name}: {value.strip(chr(39))}\n" for name, value in chosen.items()]
        broken = drawn.choice(
            ["", "", "", "seed: 1\nseed: 2\n", "train: {max_steps: 3\n", "- a\n", "\tx: 1\n", "x: !a b\n"]
        )
        (place / "options.yaml").write_text("".join(nested) + broken, encoding="utf-8")
        words.append(f"--config {place.name}/options.yaml")
    else:
        words += [f"--{name} {value}" for name, value in chosen.items()]
    if drawn.random() < 0.1:
        words.append(f"--preset {drawn.choice(['af_base', 'bert', 'lora', 'compare', 'nope'])}")
    return {"kind": "command", "command": " ".join(words)}


def make_texts(drawn: random.Random) -> list[Any]:
    """Lines of text among which are all that a file may hold: blanks, repetitions, marks, other scripts, no text."""
    import made_inputs

    lines: list[Any] = made_inputs.make_lines(drawn.randint(20, 60), str(drawn.random()))
    odd = [
        "",
        "  ",
        "short",
        lines[2],
        "a\u0301ccent and cafe\u0301 in a longer line",
        "zero\u200bwidth and \ufeffmarks in it",
    ]
    odd += [
        "NUL \0 and tab\t in a line that is long",
        "患者出现高血压和糖尿病，医生建议。",
        "x" * 700,
        f"{lines[1]}\u2028{lines[4]}",
    ]
    for each in drawn.sample(odd, drawn.randint(0, 5)):
        lines.insert(drawn.randrange(len(lines)), each)
    return lines


def write_rows(path: Path, rows: list[dict[str, Any]], drawn: random.Random, damaged: float = 0.16) -> None:
    """Write rows in the layout that a file's name says; sometimes damaged at one place."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind in ("parquet", "arrow"):
        columns = {name: [None if row.get(name) is None else str(row[name]) for row in rows] for name in rows[0]}
        sink = pa.BufferOutputStream()
        if kind == "parquet":
            pq.write_table(pa.table(columns), sink)
        else:
            with pa.ipc.new_stream(sink, pa.table(columns).schema) as stream:
                stream.write_table(pa.table(columns))
        content = bytes(sink.getvalue())
    elif kind in ("csv", "tsv"):
        text = io.StringIO()
        names = list(rows[0])
        writer = csv.writer(text, delimiter="," if kind == "csv" else "\t", lineterminator=drawn.choice(["\n", "\r\n"]))
        writer.writerows([names, *([row.get(name) for name in names] for row in rows)])
        content = text.getvalue().encode()
    elif kind == "json":
        content = json.dumps(rows, ensure_ascii=False).encode()
    elif kind == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=drawn.random() < 0.5) + "\n" for row in rows).encode()
    else:
        content = "".join(f"{row['text']}\n" for row in rows).encode()
    damage = drawn.random()
    if damage < damaged / 2:
        content = content[: len(content) * 2 // 3]
    elif damage < damaged:
        middle = len(content) // 2
        content = content[:middle] + drawn.choice([b"\xff\xfe", b"\n{\n", b'"', b"\n[1]\n"]) + content[middle:]
    path.write_bytes(gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content)


def _make_records(drawn: random.Random) -> list[dict[str, Any]]:
    rows = [{"id": i, "text": text, "title": f"On {i}"} for i, text in enumerate(make_texts(drawn))]
    for row in drawn.sample(rows, drawn.randint(0, 3)):
        row["text"] = drawn.choice([None, 7, ["a"], ""])
    return rows


ENDINGS = ("txt", "txt", "txt.gz", "jsonl", "jsonl", "jsonl.gz", "csv", "csv", "tsv", "parquet", "arrow", "json", "pdf")


def ask_corpus(place: Path, drawn: random.Random) -> Question:
    """A corpus of one or two files, prepared with some options."""
    names = [f"{i}.{drawn.choice(ENDINGS)}" for i in range(drawn.choice([1, 1, 2]))]
    for name in names:
        write_rows(place / name, _make_records(drawn), drawn)
    options = ["", "--prepare.field title", "--prepare.document blank_line", "--prepare.document file"]
    options += ["--prepare.packed true"]
    options += ["--prepare.shard_bytes 1024", "--prepare.min_document_chars 60", "--prepare.max_document_chars 90"]
    options += ["--prepare.cross_documents false", "--prepare.held_out_by document", "--prepare.field body"]
    options += ["--objective.next_sentence true --prepare.document blank_line", "--vocab.words words.txt"]
    corpus = ",".join(f"{place.name}/{name}" for name in names) if drawn.random() < 0.7 else f"'{place.name}/*'"
    base = drawn.choice(["bert", "cased", "roberta", "camembert"])
    command = f"prepare --base bases/{base} --corpus {corpus} {' '.join(drawn.sample(options, 2))}"
    return {"kind": "corpus", "command": f"{command} --train.seq_length 32 --prepare.held_out_frac 0.15"}


def ask_set(place: Path, drawn: random.Random) -> Question:
    """A labelled set of a family, in one of its layouts, with some rows that are not as they should be."""
    import made_inputs

    family = drawn.choice(made_inputs.FAMILIES)
    made_inputs.make_set(place / "set", family)
    files = sorted((place / "set").glob("[dt]*"))
    for path in files if family in ("ner", "qa") else ():
        text = path.read_text(encoding="utf-8")
        if drawn.random() < 0.5:
            old, new = drawn.choice(
                [("B-", "I-"), ("I-", "X-"), ("\tO\n", " O\n"), ("answer_start", "start"), ("true", "1")]
            )
            path.write_text(text.replace(old, new, drawn.randint(1, 4)), encoding="utf-8")
    for path in files if family not in ("ner", "qa") else ():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in drawn.sample(rows, drawn.choice([0, 0, 1, 3])):
            name = drawn.choice([each for each in row if each != "id"])
            row[name] = drawn.choice([None, "", 9, -1, "??", [], row[name], 1e400, [{"start_idx": 3}]])
        rows += drawn.sample(rows, drawn.choice([0, 0, 2]))
        is_plain = all(not isinstance(value, (list, dict)) for row in rows for value in row.values())
        kind = drawn.choice(["jsonl", "json", "csv", "tsv", "parquet"] if is_plain else ["jsonl", "json", "jsonl.gz"])
        path.unlink()
        names = dict.fromkeys(name for row in rows for name in row)
        write_rows(path.with_suffix(f".{kind}"), [{name: row.get(name) for name in names} for row in rows], drawn, 0.03)
    if drawn.random() < 0.1:
        drawn.choice(sorted((place / "set").iterdir())).unlink()
    described = drawn.choice(
        [*[""] * 8, f"task: {family}\nlabels: [a, Drug]\n", f"task: {family}\nfractions: {{train: 0.8, dev: 0.2}}\n"]
    )
    if described:
        (place / "set" / "set.yaml").write_text(described, encoding="utf-8")
    options = {"strict": drawn.random() < 0.15, "repair": drawn.random() < 0.3}
    return {"kind": "set", "task": family, "data": f"{place.name}/set", "options": options}


def ask_input(place: Path, drawn: random.Random) -> Question:
    """An input of predictions."""
    name = f"in.{drawn.choice(ENDINGS)}"
    write_rows(place / name, _make_records(drawn), drawn)
    return {"kind": "input", "spec": f"{place.name}/{name}", "field": drawn.choice(["text", "text", "title", "body"])}


# --- answers --------------------------------------------------------------------------------------------------------


def answer(question: Question, side: str) -> dict[str, Any]:
    """Answer a question with this process's package: what it makes, or the sentence of a mistake."""
    import adapter

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            found = ANSWERS[question["kind"]](adapter, question, side)
    except adapter.Mistake as error:
        return {"sentence": str(error)}
    except Exception as error:  # a crash is an answer, too
        return {"crash": f"{type(error).__name__}: {error}"}
    return {**found, "said": [each for each in said.getvalue().splitlines() if each.startswith(("warning", "dropped"))]}


def _answer_command(adapter: Any, question: Question, side: str) -> dict[str, Any]:
    return _flatten(adapter.describe_config(question["command"]))


def _answer_corpus(adapter: Any, question: Question, side: str) -> dict[str, Any]:
    cache = f"{side}/c{question['number']}"
    options = f"--prepare.cache_dir {cache} --run.dir {side} --run.name r{question['number']}"
    ended = adapter.call(f"{question['command']} {options}")
    sys.stderr.write(ended.err)
    if ended.code:
        return {"sentence": ended.err.splitlines()[-1], "code": ended.code}
    rows = adapter.read_rows(Path(cache))
    return {**rows, **{split: [[*each[:1], len(each[1]), _hash(each)] for each in rows[split]] for split in SPLITS}}


def _answer_set(adapter: Any, question: Question, side: str) -> dict[str, Any]:
    found = adapter.read_set(question["task"], question["data"], **question["options"])
    return {**found, **{split: [len(found[split]), _hash(found[split])] for split in ("train", "dev", "test")}}


def _answer_input(adapter: Any, question: Question, side: str) -> dict[str, Any]:
    rows = adapter.read_input(question["spec"], question["field"])
    return {"rows": len(rows), "faults": [row[3] for row in rows if row[3]], "sha256": _hash(rows)}


ANSWERS = {"command": _answer_command, "corpus": _answer_corpus, "set": _answer_set, "input": _answer_input}
SPLITS = "train", "held_out"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by name; several values are a list whether they were a text with commas or not."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("parts", "space", "presets", "tokens_by_method"):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            parts = (
                value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
            )
            parts = [_read_number(each) for each in parts] or [""]
            flat[prefix + name] = parts if len(parts) > 1 else parts[0]
    return flat


def _read_number(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value.strip() if isinstance(value, str) else value


def _even_out(answered: Any, checkout: Path) -> dict[str, Any]:
    """An answer without what the two sides may call otherwise."""
    text = json.dumps(answered, sort_keys=True, ensure_ascii=False, default=str).replace(str(checkout), "CHECKOUT")
    text = re.sub("|".join(rf"{name}\b" for name in NAMES), lambda match: NAMES[match[0]], text)
    evened: dict[str, Any] = json.loads(re.sub(r"\b(OLD|NEW)/", "SIDE/", text))
    return evened


def ask(checkout: Path, side: str, folder: Path, questions: list[Question]) -> subprocess.Popen[str]:
    """Start a process that answers questions with a checkout's package."""
    golden = checkout / "tests" / "golden"
    own = golden if (golden / "adapter.py").exists() else HERE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (checkout, own, HERE)))}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--answer", side]
    path = folder / f"{side}-{questions[0]['number']}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in questions), encoding="utf-8")
    return subprocess.Popen(command, stdin=path.open(), stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)


def compare(old: Path, new: Path, number: int, seed: int) -> int:
    """Ask both sides; print what differs and return how much."""
    import made_inputs

    with tempfile.TemporaryDirectory(prefix="oracle-") as place:
        folder = Path(place)
        made_inputs.make_inputs(folder)
        questions = list(make_questions(folder, number, seed))
        groups = [
            [each for each in questions if (each["kind"] == "corpus") is is_corpus] for is_corpus in (True, False)
        ]
        sides = (("OLD", old), ("NEW", new))
        processes = [(side, ask(checkout, side, folder, group)) for group in groups for side, checkout in sides]
        answers: dict[str, dict[int, Any]] = {"OLD": {}, "NEW": {}}
        for side, process in processes:
            for line in process.communicate()[0].splitlines():
                if line.startswith('{"number"'):
                    found = json.loads(line)
                    answers[side][found["number"]] = found["answer"]
        count = 0
        for each in questions:
            pair = [_even_out(answers[side].get(each["number"], {}), checkout) for side, checkout in sides]
            if pair[0] != pair[1] or not pair[0]:
                count += 1
                print(json.dumps(each, ensure_ascii=False))
                for key in sorted(key for key in {*pair[0], *pair[1]} if pair[0].get(key) != pair[1].get(key)):
                    was, now = (str(own.get(key))[:700] for own in pair)
                    print(f"  {key}: {was}\n  {'->':>{len(key) + 1}} {now}")
        kinds = Counter(each["kind"] for each in questions if "sentence" in answers["OLD"].get(each["number"], ()))
        print(f"{len(questions)} questions, {count} differences; answered with a sentence: {dict(kinds)}")
    return count


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "--answer":
        sys.path.pop(0)  # this folder, whose adapter is not the other checkout's
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps({"number": asked["number"], "answer": answer(asked, words[1])}, default=str), flush=True)
    else:
        given = dict(zip(words[2::2], map(int, words[3::2]), strict=True))
        sides = (Path(each).resolve() for each in words[:2])
        sys.exit(int(compare(*sides, given.get("--number", 300), given.get("--seed", 0)) > 0))
