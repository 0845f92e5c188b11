"""Who opens a file, whatever stands in it, gets what was meant, or one sentence: soon, and nothing is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from checkpoint_runs import make_run
from family_sets import make_family_task
from given_options import parse_config
from hostile_input import VALUES, YAML, mutate
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from labelled_fixtures import dump_lines, dump_parquet, write
from made_banks import add_drawn
from report_records import ABOUT, make_records, write_origin
from report_records import make_run as make_recorded_run
from transformers import AutoTokenizer

from domext_ray.commands.verify import run_verify
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.jobs import VerifyConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import dump_yaml, from_dict, to_dict
from domext_ray.config.options.kinds import list_options, list_sections
from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, SettledConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import CorpusError, RunError, find_user_error
from domext_ray.export.folder import ExportRecord, check_whole, find_faults, new_export, read_export_record
from domext_ray.export.vector_layout import read_pooling
from domext_ray.families.described_sets import find_description
from domext_ray.families.sets import load_set
from domext_ray.families.task_description import describe_task
from domext_ray.families.task_file import TaskFile, read_task_file, write_task_file
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.models.bank import AdapterBank
from domext_ray.models.head import read_config as read_head_config
from domext_ray.report.figures import measure_run
from domext_ray.report.summary import read_origin, read_summary
from domext_ray.runs.attempts import hold, supersede
from domext_ray.runs.events import STAGES, enter_phase, measure_times
from domext_ray.runs.run_directory import add_versions, check_order, read_config, read_run, write_config
from domext_ray.runtime.trials import Ledger, Outcome, Trial
from domext_ray.storage import Place, hash_file
from domext_ray.text.corpus.manifest import FORMAT_VERSION, find_shard_fault, read_manifest, write_manifest
from domext_ray.text.data.documents import read_documents, read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary.extension import load_extension, save_extension
from domext_ray.training.checkpoint import choose_checkpoint, find_latest
from domext_ray.training.metrics import find_last_step, read_metrics

LONGEST_SECONDS, LONGEST_LINE = 10.0, 5000  # of this process; characters
LOOP: list[Any] = []
LOOP.append(LOOP)
OBJECTS: tuple[Any, ...] = (
    *(b"x", object(), {1, 2}, np.zeros(2), np.float32("nan"), Path("a\0b"), math.nan, math.inf, 10**400, -(10**60)),
    *("", "\ud800", "a\0", None, True, 1.5, 1 + 2j, range(3), [], {}, [[]], [None], {"": ""}, {"a": None}, {1: 2}),
    *(LOOP, {"a": LOOP}, ["a", 1], {"x" * 1000: 1}, to_dict),
)
"""What a script or a notebook may give for an option."""
FLAGS = (
    *("= , a=1,a=2 a= =1 [ { 1e400 1e999999999 1_000 ٣ 1- 1-2-3 0x10 s3:// ~ ~x/y .. 0s -nan".split()),
    *("", "{a: &a [*a]}", "\udcff", "a\0b", "*" * 300, "[" + "*" * 50, "**/" * 30),
)
"""What a command line may have for one."""
CONFIGS = ((PretrainConfig, "af"), (FinetuneConfig, "finetune"), (SweepConfig, "sweeps/af_mini"))


@dataclass(frozen=True)
class Target:
    """Something that is read from a folder."""

    name: str
    make: Callable[[Path, Path], object]  # fills a folder, given a base's
    read: Callable[[Path], Any]  # reads it
    is_sealed: bool = False  # its hashes tell of every change: what is read is what was written
    writes: bool = False  # who opens it leaves a record there

    def __str__(self) -> str:
        return self.name


def write_options(config_class: Any, preset: str, folder: Path, base: Path) -> None:
    (folder / "options.yaml").write_text(dump_yaml(parse_config(config_class, preset)), encoding="utf-8")


def read_options(config_class: Any, folder: Path) -> Any:
    return parse_config(config_class, "", ["--config", str(folder / "options.yaml")])


def write_corpus_folder(folder: Path, base: Path) -> None:
    rows = pa.table({"tokens": [[2, 9, 3]] * 4})
    with pa.ipc.new_file(folder / "train-0.arrow", rows.schema) as file:
        file.write_table(rows)
    np.save(folder / "token_counts.npy", np.arange(250))
    record = {"path": "train-0.arrow", "sha256": hash_file(folder / "train-0.arrow"), "num_rows": 4, "num_tokens": 12}
    write_manifest(
        Place(folder),
        {
            **{"format": FORMAT_VERSION, "fingerprint": "a", "seq_length": 32, "tokenizer_fingerprint": "b"},
            **{"settings": {"document": "line"}, "train": [record], "held_out": [], "texts": [], "num_documents": 4},
            **{"dropped": {}, "pairs": False, "cls_id": 2, "sep_id": 3, "dropped_places": {}},
            "token_counts_sha256": hash_file(folder / "token_counts.npy"),
        },
    )


def read_corpus_folder(folder: Path) -> Any:
    manifest = read_manifest(Place(folder))
    if fault := find_shard_fault(manifest):
        raise CorpusError(fault)
    return manifest, manifest.token_counts(250).sum()


def write_recorded_run(folder: Path, base: Path) -> None:
    make_recorded_run(folder, make_records(4, eval_every=2))
    write_origin(folder, ABOUT)
    write_config(Place(folder), parse_config(PretrainConfig, "af"))
    for seconds, stage in enumerate(STAGES):
        enter_phase(Place(folder), "at work", stage, seconds)


def read_recorded_run(folder: Path) -> Any:
    return (
        *(
            read_config(Place(folder), SettledConfig),
            read_run(Place(folder)),
            read_origin(Place(folder)),
            check_order(Place(folder), {}, {}),
        ),
        *(add_versions(Place(folder), 3), read_summary(Place(folder / "summary.json")), measure_times(Place(folder))),
        *(measure_run(read_metrics(Place(folder / "metrics.jsonl"))), find_last_step(Place(folder / "metrics.jsonl"))),
    )


def write_attempt(folder: Path, base: Path) -> None:
    supersede(Place(folder))


def take_attempt(folder: Path) -> None:
    with hold(Place(folder)):
        pass


def make_adapted(folder: Path, base: Path) -> Any:
    loaded = load_base(str(base))
    config = PretrainConfig(base=str(base), method=MethodConfig(heads=1, ffn_units=8))
    model = ModelSpec(loaded, config.method).build()
    return make_run(folder, config, model, loaded)


def read_checkpoint(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_latest(Place(folder / "checkpoints")) == (found := choose_checkpoint(Place(folder / "checkpoints")))
    if found is None:
        raise RunError("there is none.")
    return found, sorted(found.state.tensors), sorted(found.fixed), found.extensions


def write_bank(folder: Path, base: Path) -> None:
    add_drawn(AdapterBank.create(folder, str(base)), "clinic", "token_classification", 1, ("O", "B-Drug", "I-Drug"))


def read_bank(folder: Path) -> Any:
    bank = AdapterBank.open(folder)
    if problems := bank.verify():
        raise RunError(problems[0])
    return {
        name: (bank.describe(name), bank.load(name).num_parameters()) for name in (bank.find_folder("clinic").name,)
    }


def write_export(folder: Path, base: Path) -> None:
    shutil.rmtree(folder)
    with new_export(Place(folder), ExportRecord("huggingface", "run", 3, "a" * 64)) as made:
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(base / name, made)


def read_export(folder: Path) -> Any:
    check_whole(Place(folder))
    record = read_export_record(Place(folder))
    if record is None:
        raise RunError("there is none.")
    for fault in find_faults(Place(folder), record):
        raise RunError(fault)
    return record


def write_vocabulary(folder: Path, base: Path) -> None:
    save_extension(folder, load_base(str(base)).vocabulary, ["thalamus", "myocarditis"], {})


def write_task(folder: Path, base: Path) -> None:
    task = make_family_task("normalization", AutoTokenizer.from_pretrained(base))
    write_task_file(folder, TaskFile(describe_task(task), {"main": "."}))


def write_trial(folder: Path, base: Path) -> None:
    Ledger(Place(folder)).write(Outcome(Trial("one", {"lr": 0.1}), ({"f1": 0.5},), "complete"))


def read_trials(folder: Path) -> Any:
    return Ledger(Place(folder)).list(), Ledger(Place(folder)).read(Trial("one", {"lr": 0.1}))


def write_base(folder: Path, base: Path) -> None:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    write(folder / "1_Pooling" / "config.json", '{"pooling_mode_cls_token": true}')


def read_base(folder: Path) -> Any:
    return read_pooling(folder), read_head_config(folder).get("model_type"), load_base(str(folder)).sha256


TEXTS = [f"The heart of patient {i} beat at {60 + i} in the morning, “naïve” 漢字." for i in range(60)]
ROWS = [{"text": text, "id": i, "group": "ab"[i % 2]} for i, text in enumerate(TEXTS)]
TABLE = "text,id,group\n" + "".join(f'"{row["text"]}",{row["id"]},{row["group"]}\n' for row in ROWS)
TABS = "text\tid\tgroup\n" + "".join(f"{row['text']}\t{row['id']}\t{row['group']}\n" for row in ROWS)


def dump_arrow(rows: list[dict[str, Any]]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


TEXT_FILES: dict[str, str | bytes] = {
    **{"a.txt": "\n\n".join(TEXTS), "b.jsonl": dump_lines(ROWS), "c.csv": TABLE, "d.tsv": TABS},
    **{"e.parquet": dump_parquet(ROWS), "f.arrow": dump_arrow(ROWS), "g.txt.gz": "\n".join(TEXTS)},
}


def read_texts(folder: Path) -> Any:
    found = []
    documents: tuple[Literal["line", "blank_line", "file"], ...] = ("line", "blank_line", "file")
    for document in documents:
        for name in sorted(path.name for path in folder.iterdir()):
            field = "" if ".txt" in name else "group"
            prepare = PrepareConfig(document=document, min_document_chars=1, shard_bytes=4096, group_field=field)
            tasks = resolve_sources(str(folder / name), prepare).tasks
            found.append([pair for task in tasks for pair in read_grouped(task, prepare, Dropped())])
    return found


def write_saved_dataset(folder: Path, base: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")


def read_saved_dataset(folder: Path) -> Any:
    prepare = PrepareConfig(min_document_chars=1)
    tasks = resolve_sources(str(folder / "saved"), prepare).tasks
    return [document for task in tasks for document in read_documents(task, prepare, Dropped())]


SENTENCE = "the drug and the heart disease"
SQUAD_ANSWERS = [{"text": "the heart", "answer_start": 13}]
SQUAD_QUESTIONS = [{"id": "q", "question": "which one?", "answers": SQUAD_ANSWERS, "is_impossible": False}]
SQUAD = json.dumps({"data": [{"title": "t", "paragraphs": [{"context": SENTENCE, "qas": SQUAD_QUESTIONS}]}]}, indent=1)
SPANS = [{"id": "1", "text": SENTENCE, "entities": [{"start": 4, "end": 8, "type": "drug", "mention": "drug"}]}]
TRIPLE = {"predicate": "helps", "subject": "drug", "object": {"@value": "heart"}, "subject_type": "a"}
SETS: dict[str, tuple[str, dict[str, str | bytes], str]] = {
    "ner, CoNLL": ("ner", {"train.tsv": "the\tO\nheart\tB-Organ\nbeats\tO\n\ncat\tO\nheart\tB-Organ\n"}, ""),
    "ner, spans": ("ner", {"train.jsonl": dump_lines(SPANS)}, "reader: spans"),
    "ner, brat": (
        "ner",
        {"train/a.txt": SENTENCE, "train/a.ann": "T1\tdrug 4 8\tdrug\nT2\tb 4 8;9 12\tdrug and\n"},
        "reader: brat",
    ),
    "ner, JSON": (
        "ner",
        {"train.json": json.dumps([{"tokens": ["a", "b"], "tags": ["O", "B-x"]}] * 2)},
        "reader: records",
    ),
    "nested_ner": ("nested_ner", {"train.json": json.dumps(SPANS, indent=1)}, ""),
    "relation": ("relation", {"train.tsv": "1\t<< drug >> and [[ heart ]]\tr\n"}, "columns: {text: 1, label: 2}"),
    "classification": ("classification", {"train.csv": 'text,label\n"a, b",x\nc,y\n'}, "labels: [x, y]"),
    "classification, Parquet": ("classification", {"train.parquet": dump_parquet([{"text": "a", "label": 1}] * 3)}, ""),
    "multilabel": ("multilabel", {"train.tsv": "text\tlabels\na\tx##y\nb\tx\n"}, ""),
    "multilabel, columns": (
        "multilabel",
        {"train.csv": "text,x,y\na,1,0\nb,0,1\n"},
        "reader: label_columns\nlabels: [x, y]",
    ),
    "regression": ("regression", {"train.jsonl.gz": dump_lines([{"text": "a", "pair": "b", "value": 1.5}] * 3)}, ""),
    "qa": ("qa", {"train.json": SQUAD}, ""),
    "multiple_choice": (
        "multiple_choice",
        {"train.jsonl": dump_lines([{"context": "a", "options": ["b", "c"], "answer": 1}] * 2)},
        "columns: {context: context, options: options, answer: answer}",
    ),
    "relation_extraction": (
        "relation_extraction",
        {
            "train.jsonl": dump_lines([{"text": SENTENCE, "spo_list": [TRIPLE]}] * 2),
            "schema.jsonl": dump_lines([{"predicate": "helps", "subject_type": "a", "object_type": {"@value": "b"}}]),
        },
        "schema: schema.jsonl",
    ),
    "normalization": (
        "normalization",
        {"train.tsv": "text\tterms\nheart pain\tpain##heart\n", "catalogue.txt": "pain\nheart\n"},
        "",
    ),
}


def write_set(name: str, folder: Path, base: Path) -> None:
    task, files, description = SETS[name]
    dev = next(file for file in files if file.startswith("train"))
    dev = dev.partition("/")[0]
    extra = f"task: {task}\nfiles: {{train: {dev}, dev: {dev}}}\n{description}\n"
    for path, content in {**files, "set.yaml": extra}.items():
        write(folder / path, content)


def read_set(name: str, folder: Path) -> Any:
    description = find_description(SETS[name][0], str(folder))
    return [load_set(description, repair=repair) for repair in (False, True)]


def write_files(files: dict[str, str | bytes], folder: Path, base: Path) -> None:
    for name, content in files.items():
        write(folder / name, content)


def verify(folder: Path) -> None:
    run_verify(VerifyConfig(path=str(folder)))


TARGETS = [
    *(
        Target(f"options of {kind.__name__}", partial(write_options, kind, preset), partial(read_options, kind))
        for kind, preset in CONFIGS
    ),
    Target("a prepared corpus", write_corpus_folder, read_corpus_folder, is_sealed=True),
    Target("a run's records", write_recorded_run, read_recorded_run),
    Target("an attempt", write_attempt, take_attempt, writes=True),
    Target("a checkpoint", make_adapted, read_checkpoint, is_sealed=True),
    Target("a bank", write_bank, read_bank, is_sealed=True),
    Target("an export", write_export, read_export),
    Target("a vocabulary", write_vocabulary, load_extension),
    Target("a task", write_task, read_task_file),
    Target("trials", write_trial, read_trials),
    Target("a base", write_base, read_base),
    *(
        Target(f"text, {name}", partial(write_files, {name: content}), read_texts)
        for name, content in TEXT_FILES.items()
    ),
    Target("text, a saved dataset", write_saved_dataset, read_saved_dataset),
    *(Target(f"a set, {name}", partial(write_set, name), partial(read_set, name)) for name in SETS),
    *(
        Target(f"verify, {name}", make, verify)
        for name, make in (
            ("a corpus", write_corpus_folder),
            ("a run", write_recorded_run),
            ("a checkpoint", make_adapted),
            ("a bank", write_bank),
            ("an export", write_export),
            ("a vocabulary", write_vocabulary),
        )
    ),
]


def read_tree(folder: Path) -> dict[str, bytes | str]:
    """What is in a folder, but for the hashes that are remembered there."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.name.startswith(".hashes")]
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in paths
    }


def damage(draw: st.DrawFn, folder: Path) -> str:
    """Damage one file of a folder; return what was done."""
    path = draw(st.sampled_from(sorted(file for file in folder.rglob("*") if file.is_file())))
    kind = draw(st.integers(0, 12))
    content = path.read_bytes()
    if kind < 10:
        path.write_bytes(made := draw(mutate(path.name, content)))
        return f"{path.relative_to(folder)} is {made[:300]!r} ({len(made)} bytes)"
    path.unlink()
    if kind == 10:
        path.mkdir()
    elif kind == 11:
        path.symlink_to(draw(st.sampled_from(("nowhere", path.name, "/dev/null"))))
    return f"{path.relative_to(folder)}: {kind}"


@contextmanager
def taken_or_refused() -> Iterator[None]:
    """What a job that meets an error here says is one line, and comes soon."""
    started = time.process_time()
    try:
        yield
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None:
            raise
        assert len(str(mistake).splitlines()) == 1 and len(str(mistake)) < LONGEST_LINE
    assert time.process_time() - started < LONGEST_SECONDS


def open_damaged(target: Target, sound: Path, folder: Path, draw: Any, expected: str) -> None:
    shutil.rmtree(folder)
    shutil.copytree(sound, folder)
    note(damage(draw, folder))
    before = read_tree(folder)
    with taken_or_refused():
        found = str(target.read(folder))
        assert not target.is_sealed or found == expected
    assert target.writes or read_tree(folder) == before


def hostile(num_examples: int) -> Callable[[Any], Any]:
    """Draw so many examples, the same ones each time."""
    shown = settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda check: shown(given(st.data())(check))


def in_both_tiers(few: int, many: int) -> Any:
    return pytest.mark.parametrize("number", [few, pytest.param(many, marks=pytest.mark.slow)])


@pytest.mark.parametrize("target", TARGETS, ids=str)
@in_both_tiers(12, 300)
def test_what_is_read_is_right_or_refused(target: Target, number: int, tiny_base_folder: Path, tmp_path: Path) -> None:
    sound, folder = tmp_path / "sound", tmp_path / "damaged"
    sound.mkdir()
    target.make(sound, tiny_base_folder)
    shutil.copytree(sound, folder)
    expected = str(target.read(folder))

    @hostile(number)
    def check(data: st.DataObject) -> None:
        open_damaged(target, sound, folder, data.draw, expected)

    check()


@pytest.mark.parametrize(("kind", "preset"), CONFIGS)
@in_both_tiers(40, 1000)
def test_an_option_of_any_value_is_taken_or_refused(kind: Any, preset: str, number: int) -> None:
    names = [*list_options(kind), *list_sections(kind)]

    @hostile(number)
    def check(data: st.DataObject) -> None:
        name, text = data.draw(st.sampled_from(names)), data.draw(st.sampled_from((*FLAGS, *VALUES, *YAML)))
        with taken_or_refused():
            parse_config(kind, preset, [f"--{name}={text}"])
        with taken_or_refused():
            from_dict(kind, {name: data.draw(st.sampled_from(OBJECTS))})

    check()
