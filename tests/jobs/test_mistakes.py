"""What a user may get wrong: one sentence with the value, the rule and what to change, exit code 2, nothing left."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import ray
from conftest import WORDS, write_corpus
from job_calls import call_job

MISTAKES: dict[str, tuple[tuple[str, ...], ...]] = {
    "pretrain_af": (
        ("--no_such_flag 1", "no_such_flag"),
        ("--config {yaml_key}", "{yaml_key}", "line 2", "max_stepz", "max_steps"),
        ("--corpus {corpus} {lines} --seed 1", "--corpus", "quotes"),
        ("--run.name {long_name}", "--run.name"),
        ("--run.dir {corpus}", "{corpus}", "--run.dir"),
        ("--train.general_probe /no/such/probe.txt", "/no/such/probe.txt"),
        ("--base {empty}", "{empty}"),
        ("--base {no_tokenizer}", "{no_tokenizer}", "tokenizer"),
        ("--base {corpus}", "{corpus}"),
        ("--base {base} --method.layers 0-99", "--method.layers", "99"),
        ("--base {base} --train.seq_length 4096", "--train.seq_length", "4096", "128"),
        ("--base {base} --init_from /no/such/run", "--init_from", "/no/such/run"),
        ("--base {base} --corpus '{folder}/*.nothing'", "*.nothing"),
        ("--base {base} --corpus {empty}", "{empty}"),
        ("--base {base} --corpus {utf16}", "{utf16}", "UTF-8"),
        ("--base {base} --corpus {parquet} --prepare.field body", "--prepare.field", "body", "text"),
        ("--base {base} --corpus {loop}", "{loop}"),
    ),
    "pretrain_exbert": (
        ("--base {base} --vocab.words /no/words.txt --vocab.size 0", "/no/words.txt"),
        ("--base {base} --corpus {notes}", "{notes}", "--prepare.group_field MRN", "--vocab.size"),
    ),
    "pretrain_bert": (("--base none --vocab.size 300 --corpus {notes} --dry_run", "--prepare.group_field MRN"),),
    "prepare_corpus": (
        ("--base {base} --corpus /no/such.txt", "/no/such.txt"),
        ("--base {base} --corpus {notes} --vocab.size 9 --dry_run", "{notes}", "--prepare.group_field none"),
    ),
    "build_vocab": (
        ("--base {base} --corpus {corpus} --vocab.size 10 --vocab.extend /no/such", "/no/such"),
        ("--base {base} --corpus {notes} --vocab.size 10", "{notes}", "20 different 'MRN' in 40 rows"),
    ),
    "finetune": (
        ("--task ner --data {empty} --model {base}", "{empty}"),
        ("--task ner --data {ner} --model {base}", "{ner}", "train"),
    ),
    "export_hf": (("--run {empty}", "{empty}"),),
    "compare_runs": (("--runs {empty}", "{empty}"),),
    "compare": (("--seconds 5 --methods af,nope", "nope"),),
    "evaluate_forgetting": (("--models /no/such/model --corpus {corpus}", "/no/such/model"),),
    "bank": (
        ("--bank {folder}/nobank", "{folder}/nobank"),
        ("--bank {folder}/nobank --add /no/such/run --name x", "/no/such/run"),
    ),
    "sweep": (("--config {yaml_space}", "method.headz", "method.heads"),),
    "ablate": (("--study spans --finetuned /no/such/run", "/no/such/run"),),
}
"""Files in jobs/ -> what follows one, and parts of its sentence; {name} is a place that `places` makes.

Each rule of an option is in config/test_rules.py, whole sentences are in golden/mistakes.json.
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_base_folder: Path) -> dict[str, str]:
    """What the commands name: a base and a text in order, and everything that is damaged."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "lines.txt").write_text("One line of text that is long enough.\n" * 3)
    (folder / "utf16.txt").write_text("A line that is long enough for a document.\n" * 30, encoding="utf-16")
    pq.write_table(pa.table({"text": ["A row of text that is long enough."] * 30}), folder / "parquet.parquet")
    (folder / "yaml_key.yaml").write_text("train:\n  max_stepz: 3\n")
    (folder / "yaml_space.yaml").write_text("space:\n  method.headz: {choice: [0, 1]}\nbudget: {steps: 5}\n")
    write_corpus(folder / "corpus.txt", 40)
    texts = (folder / "corpus.txt").read_text().splitlines()
    notes = pa.table({"MRN": [i % 20 for i in range(40)], "text": [f"{i} {text}" for i, text in enumerate(texts)]})
    pc.write_csv(notes, folder / "notes.csv")
    (folder / "empty").mkdir()
    (folder / "ner").mkdir()
    (folder / "ner" / "train.tsv").write_text("".join(f"{word}\tI-\n" for word in WORDS[:20]))
    (folder / "ner" / "dev.tsv").write_text("word\tO\n")
    shutil.copytree(tiny_base_folder, folder / "no_tokenizer", ignore=shutil.ignore_patterns("*token*"))
    (folder / "loop").symlink_to(folder / "loop")
    made = {path.stem: str(path) for path in folder.iterdir()}
    return {**made, "folder": str(folder), "base": str(tiny_base_folder), "long_name": "a" * 300}


def list_files(*folders: Path) -> list[str]:
    return sorted(str(path) for folder in folders for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("job", "args", "says"),
    [pytest.param(job, args, says, id=f"{job} {args}") for job, own in MISTAKES.items() for args, *says in own],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    job: str, args: str, says: list[str], places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told before Ray starts: where the session has one, a second would fail."""
    monkeypatch.chdir(tmp_path)
    before, has_ray = list_files(Path(places["folder"]), Path(places["base"])), ray.is_initialized()
    with monkeypatch.context() as patch:
        if has_ray:
            patch.setattr(ray, "is_initialized", lambda: False)
        code, out, err = call_job(job, *shlex.split(args.format(**places)))
    is_started = ray.is_initialized() and not has_ray
    if is_started:
        ray.shutdown()
    assert (code, out) == (2, ""), f"{out}\n{err}"
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    missing = [text for text in (part.format(**places) for part in says) if text not in err]
    assert not missing, f"{missing} missing: {err}"
    assert list_files(tmp_path) == []
    assert list_files(Path(places["folder"]), Path(places["base"])) == before
    assert not is_started, "Ray was started before the mistake was told"
