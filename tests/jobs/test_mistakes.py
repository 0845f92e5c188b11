"""What a user may get wrong: one sentence with the value, the rule and what to change, exit code 2, nothing left."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from conftest import WORDS, write_corpus
from job_calls import call_job


@dataclass(frozen=True)
class Mistake:
    """A wrong command.

    Args:
        job: file in jobs/, without its ending.
        args: what follows it, as one would type it; {name} stands for a place that `make_places` makes.
        says: parts that the sentence must have.
    """

    job: str
    args: str
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.job} {self.args}"


def _of(job: str, *mistakes: tuple[str, ...]) -> list[Mistake]:
    return [Mistake(job, args, says) for args, *says in mistakes]  # type: ignore[misc]


OPTIONS = _of(
    "pretrain_af",
    ("--no_such_flag 1", "no_such_flag"),
    ("--train.max_step 10", "max_step", "--train.max_steps"),
    ("--train.max_steps abc", "--train.max_steps", "abc"),
    ("--train.max_steps 1.5", "--train.max_steps", "1.5"),
    ("--train.max_steps 0", "--train.max_steps"),
    ("--train.max_steps -5", "--train.max_steps", "-5"),
    ("--train.max_steps", "--train.max_steps"),
    ("--train.max_seconds nan", "--train.max_seconds", "nan"),
    ("--train.max_seconds -1", "--train.max_seconds", "-1"),
    ("--train.save_every 0", "--train.save_every", "it must be steps, 1 or more, or a time, such as 90s, 15m or 2h"),
    ("--train.evaluate_every 15min", "--train.evaluate_every", "15min", "steps, 1 or more, or a time"),
    ("--optim.lr 0", "--optim.lr", "above 0"),
    ("--optim.lr nan", "--optim.lr", "nan"),
    ("--optim.lr inf", "--optim.lr", "inf"),
    ("--optim.lr fast", "--optim.lr", "fast"),
    ("--optim.beta1 1", "--optim.beta1", "below 1"),
    ("--optim.warmup_steps 50 --optim.decay_steps 50", "--optim.warmup_steps", "--optim.decay_steps"),
    ("--optim.on_non_finite ignore", "--optim.on_non_finite", "ignore", "stop", "skip"),
    ("--engine.zero_stage 7", "--engine.zero_stage", "7"),
    ("--engine.precision fp16", "--engine.precision", "fp16", "bf16"),
    ("--engine.offload true", "--engine.offload", "--engine.zero_stage"),
    ("--engine.compile true --engine.zero_stage 3", "--engine.compile", "--engine.zero_stage"),
    ("--engine.base_dtype bf16 --engine.precision fp32", "--engine.base_dtype", "--engine.precision"),
    ("--method.heads -1", "--method.heads", "-1"),
    ("--method.ffn_units 1.5", "--method.ffn_units", "1.5"),
    ("--method.layers 9-3", "--method.layers", "9-3"),
    ("--method.layers abc", "--method.layers", "abc"),
    ("--base {base} --method.layers 0-99", "--method.layers", "99"),
    ("--method.trains nothing", "--method.trains", "nothing", "extensions"),
    ("--replay.corpus none --method.heads 0 --method.ffn_units 0 --method.trains top_layers", "--method.top_layers"),
    ("--method.adapter 'my adapter'", "--method.adapter", "my adapter"),
    ("--method.lora_rank 4 --method.lora_targets keys", "--method.lora_targets", "keys", "key"),
    ("--method.bottleneck_place middle", "--method.bottleneck_place", "middle"),
    ("--method.module_hidden_size 12", "--method.module_ffn_size", "12"),
    ("--base {base} --method.module_hidden_size 13 --method.module_ffn_size 16", "--method.module_hidden_size", "13"),
    ("--method.trainable_budget 1.5", "--method.trainable_budget", "1.5"),
    ("--replay.corpus none --method.heads 0 --method.ffn_units 0", "--method.heads", "--method.ffn_units"),
    ("--method.name lora", "--method.name", "lora"),
    ("--method.name a/b", "a/b"),
    ("--method.active_adapters other", "--method.active_adapters", "other"),
    ("--objective.mask_prob 0", "--objective.mask_prob", "between 0 and 1"),
    ("--objective.mask_prob 2", "--objective.mask_prob", "2"),
    ("--objective.mask_token_frac 0.9 --objective.random_token_frac 0.2", "--objective.random_token_frac", "0.2"),
    ("--objective.kind left_to_right", "--objective.kind", "left_to_right", "causal"),
    ("--train.seq_length 4", "--train.seq_length", "8 or more"),
    ("--base {base} --train.seq_length 4096", "--train.seq_length", "4096", "128"),
    ("--train.long_seq_length 64", "--train.long_seq_length", "--train.seq_length"),
    ("--train.dropout 1", "--train.dropout", "below 1"),
    ("--train.global_batch_size 30 --scale.num_workers 31", "--scale.num_workers", "--train.global_batch_size"),
    ("--train.micro_batch_size 33", "--train.micro_batch_size", "33"),
    ("--scale.num_workers 0", "--scale.num_workers", "1 or more"),
    ("--scale.num_workers 1000", "--scale.num_workers", "1000"),
    ("--scale.use_gpu maybe", "--scale.use_gpu", "maybe"),
    ("--seed -1", "--seed", "-1"),
    ("--dry_run perhaps", "--dry_run", "perhaps"),
    ("--run.name ..", "--run.name", ".."),
    ("--run.name a/b", "--run.name", "a/b"),
    ("--run.name .corpora", "--run.name", ".corpora"),
    ("--run.name {long_name}", "--run.name"),
    ("--run.name 'two\nlines'", "--run.name"),
    ("--run.dir s3://bucket", "--run.dir", "s3://bucket"),
    ("--run.dir {corpus}", "{corpus}", "--run.dir"),
    ("--run.keep_checkpoints 0", "--run.keep_checkpoints", "1 or more"),
    ("--prepare.document paragraph", "--prepare.document", "paragraph", "blank_line"),
    ("--prepare.held_out_frac 0.9", "--prepare.held_out_frac", "0.9"),
    ("--prepare.min_document_chars 0", "--prepare.min_document_chars", "1 or more"),
    ("--train.general_probe /no/such/probe.txt", "/no/such/probe.txt"),
    ("--corpus {corpus} {lines} --seed 1", "--corpus", "quotes"),
    ("--init_from /no/such/run --base {base}", "--init_from", "/no/such/run"),
    ("--method {corpus}", "--method"),
)
BASES = _of(
    "pretrain_af",
    ("--base /no/such/base", "/no/such/base"),
    ("--base {empty}", "{empty}"),
    ("--base {no_tokenizer}", "{no_tokenizer}", "tokenizer"),
    ("--base {bad_config}", "{bad_config}"),
    ("--base {cut_tensors}", "{cut_tensors}"),
    ("--base {corpus}", "{corpus}"),
    ("--base none", "--replay.corpus", "self"),
    ("--base none --replay.corpus none", "--vocab.size"),
    ("--base none --replay.corpus none --vocab.size 300", "--method.trains", "all"),
)
CORPORA = _of(
    "pretrain_af",
    ("--base {base} --corpus /no/such/text.txt", "/no/such/text.txt"),
    ("--base {base} --corpus no/such", "no/such", "hf://"),
    ("--base {base} --corpus '{folder}/*.nothing'", "*.nothing"),
    ("--base {base} --corpus {empty_file}", "{empty_file}"),
    ("--base {base} --corpus {empty}", "{empty}"),
    ("--base {base} --corpus {records} --prepare.field body", "--prepare.field", "body", "text"),
    ("--base {base} --corpus {array}", "{array}", "JSON Lines"),
    ("--base {base} --corpus {broken_record}", "{broken_record}", "3"),
    ("--base {base} --corpus {latin}", "{latin}", "UTF-8"),
    ("--base {base} --corpus {utf16}", "{utf16}", "UTF-8"),
    ("--base {base} --corpus {pdf}", "{pdf}"),
    ("--base {base} --corpus {cut_parquet}", "{cut_parquet}"),
    ("--base {base} --corpus {parquet} --prepare.field body", "--prepare.field", "body", "text"),
    ("--base {base} --corpus {csv} --prepare.field body", "--prepare.field", "body", "text"),
    ("--base {base} --corpus {dataset}", "{dataset}", "../secret.txt"),
    ("--base {base} --corpus {loop}", "{loop}"),
)
FILES = _of(
    "pretrain_af",
    ("--config /no/such.yaml", "--config", "/no/such.yaml"),
    ("--config {folder}", "--config", "{folder}"),
    ("--config {yaml_empty}", "{yaml_empty}"),
    ("--config {yaml_syntax}", "{yaml_syntax}", "line 2"),
    ("--config {yaml_key}", "{yaml_key}", "line 2", "max_stepz", "max_steps"),
    ("--config {yaml_type}", "{yaml_type}", "max_steps", "many"),
    ("--config {yaml_include}", "{yaml_include}", "!include"),
    ("--config {yaml_object}", "{yaml_object}", "python"),
    ("--config {yaml_list}", "{yaml_list}"),
    ("--config {yaml_twice}", "{yaml_twice}", "seed"),
    ("--config {latin}", "{latin}"),
)
OTHERS = [
    *_of(
        "pretrain_bert",
        ("--method.name lora", "--method.name", "lora"),
        ("--base none --vocab.size 10", "--vocab.size", "64 or more"),
        ("--base none --vocab.size 300 --shape.hidden_size 30", "--shape.hidden_size", "--shape.num_attention_heads"),
        ("--base none --vocab.size 300 --train.seq_length 1024", "--train.seq_length", "1024"),
    ),
    *_of(
        "pretrain_exbert",
        ("--base {base} --vocab.words /no/words.txt --vocab.size 0", "/no/words.txt"),
        ("--base {base} --vocab.words {corpus}", "--vocab.size", "--vocab.words"),
        ("--vocab.min_frequency 0", "--vocab.min_frequency", "1 or more"),
    ),
    *_of("pretrain_bottleneck", ("--method.bottleneck_std 0", "--method.bottleneck_std", "above 0")),
    *_of("prepare_corpus", ("--base {base} --corpus /no/such.txt", "/no/such.txt")),
    *_of(
        "build_vocab",
        ("--base {base} --corpus {corpus}", "--vocab.size"),
        ("--base {base} --corpus {corpus} --vocab.size -1", "--vocab.size", "-1"),
        ("--base {base} --corpus {corpus} --vocab.size 10 --vocab.extend /no/such", "/no/such"),
    ),
    *_of(
        "finetune",
        ("--data nope --task ner", "nope"),
        ("--task nope", "--task", "nope"),
        ("--task nerr --data {folder}", "nerr", "ner"),
        ("--model nope", "nope"),
        ("--grid.lr abc", "--grid.lr", "abc"),
        ("--grid.lr nan", "--grid.lr", "nan"),
        ("--grid.lr 1e-4,0.0001", "--grid.lr", "0.0001"),
        ("--grid.restarts 0", "--grid.restarts", "from 1 to 1,000"),
        ("--grid.batch_size 1.5", "--grid.batch_size", "1.5"),
        ("--features.layers 9-3", "--features.layers", "9-3"),
        ("--labelled.stride 100", "--labelled.stride", "100"),
        ("--method.trains extensions --method.word_rows 9", "--method.word_rows", "0"),
        ("--run.name a/b", "--run.name", "a/b"),
        ("--num_resamples 1", "--num_resamples", "100 or more"),
        ("--task ner --data {empty} --model {base}", "{empty}"),
        ("--task ner --data {ner} --model {base}", "{ner}", "train"),
    ),
    *_of(
        "export_hf",
        ("", "--run"),
        ("--run /no/such/run", "/no/such/run"),
        ("--run {empty}", "{empty}"),
        ("--run {empty} --format zip", "--format", "zip"),
        ("--run {empty} --format peft --dtype float16", "--dtype", "float16"),
    ),
    *_of(
        "compare_runs",
        ("", "--runs"),
        ("--runs /no/such/run", "/no/such/run"),
        ("--runs {empty}", "{empty}"),
        ("--runs {empty},{empty}", "{empty}"),
    ),
    *_of(
        "compare",
        ("--seconds 0", "--seconds", "--tokens"),
        ("--seconds 5 --methods af,af", "--methods"),
        ("--seconds 5 --methods af,nope", "nope"),
        ("--seconds 5 --seeds 0", "--seeds"),
        ("--seconds 5 --budget 2", "--budget"),
    ),
    *_of(
        "evaluate_forgetting",
        ("--corpus {corpus}", "--models"),
        ("--models {base},{base} --corpus {corpus}", "--models"),
        ("--models {base} --corpus /no/such.txt", "/no/such.txt"),
        ("--models /no/such/model --corpus {corpus}", "/no/such/model"),
        ("--models {base} --corpus {corpus} --mask_frac 2", "--mask_frac", "2"),
    ),
    *_of(
        "bank",
        ("", "--bank"),
        ("--bank {folder}/nobank", "{folder}/nobank"),
        ("--bank {folder}/nobank --add /no/such/run --name x", "/no/such/run"),
        ("--bank {folder}/nobank --name x", "--name", "--add"),
        ("--bank {folder}/nobank --add {empty} --name 'a b'", "--name", "a b"),
        ("--bank {folder}/nobank --add a --name a --remove b", "--add", "--remove"),
    ),
    *_of(
        "sweep",
        ("--search.trials 0", "--search.trials", "1 or more"),
        ("--search.objectives f2", "--search.objectives", "f2"),
        ("--search.scheduler asha --search.rungs 1", "--search.rungs"),
        ("--train.max_steps 5", "--train.max_steps", "--budget"),
        ("--config {yaml_space}", "method.headz", "method.heads"),
        ("--budget.steps 5 --budget.tokens 5", "--budget"),
        ("--scale.num_workers 2", "--scale.num_workers", "2"),
    ),
    *_of(
        "ablate",
        ("--study nothing", "--study", "nothing"),
        ("--study spans", "--finetuned"),
        ("--study spans --finetuned /no/such/run", "/no/such/run"),
        ("--study sigma --sigmas 2", "--sigmas", "2"),
    ),
]
MISTAKES = [*OPTIONS, *BASES, *CORPORA, *FILES, *OTHERS]


def make_places(folder: Path, base: Path) -> dict[str, str]:
    """Make what the commands name: a base and a text in order, and everything that is damaged."""
    places = {"folder": folder, "base": base, "corpus": write_corpus(folder / "corpus.txt", 40)}

    def write(name: str, content: str | bytes) -> None:
        places[Path(name).stem] = folder / name
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    write("lines.txt", "One line of text that is long enough.\n" * 3)
    write("empty_file.txt", "")
    write("records.jsonl", '{"text": "One record of text that is long enough."}\n' * 30)
    write("array.jsonl", json.dumps([{"text": "One record of text that is long enough."}] * 3, indent=1))
    write("broken_record.jsonl", '{"text": "A record of text that is long enough."}\n' * 2 + '{"text": "cut\n')
    write("latin.txt", "Die Prüfung der Größe führt zu höheren Werten über Jahre.\n".encode("latin-1") * 30)
    write("utf16.txt", ("A line of text that is long enough for a document.\n" * 30).encode("utf-16"))
    write("pdf.pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + bytes(range(256)) * 20)
    write("csv.csv", "id,text\n" + "1,A cell of text that is long enough.\n" * 30)
    pq.write_table(pa.table({"text": ["A row of text that is long enough."] * 30}), folder / "parquet.parquet")
    places["parquet"] = folder / "parquet.parquet"
    write("cut_parquet.parquet", (folder / "parquet.parquet").read_bytes()[:-40])
    write("yaml_empty.yaml", "")
    write("yaml_syntax.yaml", "train:\n  {max_steps: 3\n")
    write("yaml_key.yaml", "train:\n  max_stepz: 3\n")
    write("yaml_type.yaml", "train:\n  max_steps: many\n")
    write("yaml_include.yaml", f"train: !include {folder / 'corpus.txt'}\n")
    write("yaml_object.yaml", 'corpus: !!python/object/apply:os.system ["true"]\n')
    write("yaml_list.yaml", "- corpus\n- base\n")
    write("yaml_twice.yaml", "seed: 1\nseed: 2\n")
    write("yaml_space.yaml", "space:\n  method.headz: {choice: [0, 1]}\nbudget: {steps: 5}\n")
    for name in ("empty", "ner", "dataset", "no_tokenizer", "bad_config", "cut_tensors"):
        places[name] = folder / name
        places[name].mkdir()
    (folder / "ner" / "train.tsv").write_text("".join(f"{word}\tI-\n" for word in WORDS[:20]))
    (folder / "ner" / "dev.tsv").write_text("word\tO\n")
    (folder / "secret.txt").write_text("A secret of the machine, which is no corpus.\n" * 5)
    state = {"_data_files": [{"filename": "../secret.txt"}], "_fingerprint": "0", "_format_type": None, "_split": None}
    (folder / "dataset" / "state.json").write_text(json.dumps(state))
    (folder / "dataset" / "dataset_info.json").write_text("{}")
    for name in ("no_tokenizer", "bad_config", "cut_tensors"):
        for file in base.iterdir():
            if not (name == "no_tokenizer" and "token" in file.name):
                (folder / name / file.name).write_bytes(file.read_bytes())
    (folder / "bad_config" / "config.json").write_text('{"model_type": "bert", "hidden_si')
    tensors = folder / "cut_tensors" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1000])
    (folder / "loop").symlink_to(folder / "loop")
    return {**{name: str(path) for name, path in places.items()}, "loop": f"{folder}/loop", "long_name": "a" * 300}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_base_folder: Path) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"), tiny_base_folder)


def list_files(*folders: Path) -> list[str]:
    return sorted(str(path) for folder in folders for path in folder.rglob("*"))


def check_sentence(mistake: Mistake, places: dict[str, str], code: int, out: str, err: str) -> None:
    assert code == 2, f"exit code {code}\n{out}\n{err}"
    assert out == "", out
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    missing = [each for each in (part.format(**places) for part in mistake.says) if each not in err]
    assert not missing, f"{missing} missing: {err}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    mistake: Mistake, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told before Ray starts: where the session has one, a second would fail."""
    monkeypatch.chdir(tmp_path)
    before, has_ray = list_files(Path(places["folder"]), Path(places["base"])), ray.is_initialized()
    with monkeypatch.context() as patch:
        if has_ray:
            patch.setattr(ray, "is_initialized", lambda: False)
        code, out, err = call_job(mistake.job, *shlex.split(mistake.args.format(**places)))
    is_started = ray.is_initialized() and not has_ray
    if is_started:
        ray.shutdown()
    check_sentence(mistake, places, code, out, err)
    assert list_files(tmp_path) == []
    assert list_files(Path(places["folder"]), Path(places["base"])) == before
    assert not is_started, "Ray was started before the mistake was told"
