"""A rank of a run in this process: weights that blow up, text without masks, a request to stop, a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import write_corpus
from file_limits import limit_files
from ruinous_rates import RUINOUS, let_ruin
from safetensors.torch import load_file
from small_runs import attempts, find_saved, list_saved, make_config, make_train, read_records, train_in_cuts

from domext_ray import storage
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ObjectiveConfig, OptimConfig, ReplayConfig
from domext_ray.errors import RunError, StorageError, TrainingError
from domext_ray.files import ASSETS
from domext_ray.model.base import load_base
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS
from domext_ray.pretraining.inputs import prepare_run
from domext_ray.pretraining.plan import resolve
from domext_ray.report.figures import measure_run
from domext_ray.runs.attempts import Attempt
from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.training.evaluate import GENERAL_PROBE, SETS, build_base_evaluations
from domext_ray.training.notices import LIMIT, TAKEN, TOLD, Notices
from domext_ray.training.passages import NOTHING
from domext_ray.training.phases import BatchMaker, make_phases
from domext_ray.training.records import MAX_SKIPPED_STEPS
from domext_ray.training.router import RouterRecord, save_routers
from domext_ray.training.run import Run
from domext_ray.training.worker import PretrainWorker

Start = Callable[..., PretrainWorker]


@pytest.fixture(scope="module")
def task(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Run:
    corpus = write_corpus(tmp_path_factory.mktemp("worker") / "corpus.txt", 400)
    return prepare_run(resolve(make_config(tiny_base_folder, corpus)))


@pytest.fixture
def start(task: Run, tmp_path: Path) -> Iterator[Start]:
    """Gives the worker of a new attempt in one run's directory."""
    with attempts() as begin:
        yield partial(begin, task, tmp_path)


def read_steps(run: Path) -> list[int]:
    return [record["step"] for record in read_records(run)]


def read_progress(run: Path) -> list[tuple[float | None, int | None]]:
    """Loss and tokens so far of every step."""
    return [(record.get("train/mlm_loss"), record.get("train/tokens")) for record in read_records(run)]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_base_that_only_guesses_is_told(is_own: bool, tmp_path: Path, local_ray: None) -> None:
    """As where a tokenizer with the same entries in another order lies beside the weights."""
    base = tmp_path / "base"
    shutil.copytree(ASSETS / "general-mini", base)
    tokenizer = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    if not is_own:
        vocab = tokenizer["model"]["vocab"]
        words = [word for word, i in vocab.items() if i >= 5]
        vocab.update(zip(words, [vocab[word] for word in reversed(words)], strict=True))
        (base / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    run = prepare_run(resolve(make_config(base, Path(shutil.copy(GENERAL_PROBE, tmp_path / "corpus.txt")))))
    with attempts() as begin:
        begin(run, tmp_path / "run").run(1)
    said = [event.text for event in EventReader(Place(tmp_path / "run"), from_start=True).read()]
    told = [text for text in said if "no better than a guess among its 8,192 entries" in text]
    assert len(told) == (not is_own) and all(text.startswith(f"warning: the base {str(base)!r}") for text in told), said


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_loss_that_is_not_finite_stops_with_advice_that_works(start: Start, tmp_path: Path, reads_late: bool) -> None:
    optim = OptimConfig(decay_steps=16, warmup_steps=1)
    worker = start()
    worker.records.reads_late = reads_late  # as on a GPU
    worker.run(7)
    poison(worker)
    with pytest.raises(TrainingError, match=r"step 8 has a loss of nan .* --run\.name, or --optim\.on_non_finite skip"):
        worker.run()
    with pytest.raises(TrainingError, match="the same command goes on from step 7"):
        worker.run()
    start(optim=replace(optim, on_non_finite="skip")).run()
    assert read_steps(tmp_path) == list(range(17))


def poison(worker: PretrainWorker) -> None:
    with torch.no_grad():
        next(iter(worker.engine._trainables.values())).fill_(math.nan)


@pytest.mark.parametrize("reads_late", [False, True])
def test_skipping_has_an_end_and_no_checkpoint_holds_what_was_skipped_for(
    start: Start, tmp_path: Path, reads_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate at which the first step already ruins the weights: all later ones are skipped."""
    let_ruin(monkeypatch)
    optim = OptimConfig(lr=RUINOUS, decay_steps=100, warmup_steps=1, on_non_finite="skip")
    worker = start(optim=optim, train=make_train(100, save_every=3))
    worker.records.reads_late = reads_late
    with pytest.raises(TrainingError, match=r"as have the 10 steps before it.* a lower --optim\.lr under another"):
        worker.run()
    skipped = [record["train/skipped"] for record in read_records(tmp_path)[1:]]
    assert skipped == [0] + [1] * MAX_SKIPPED_STEPS
    assert list_saved(tmp_path) == []


def test_an_end_among_skipped_steps_leaves_a_checkpoint_that_the_next_start_looks_at(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights may be ruined, and finite: nobody has seen a step that works with them."""
    let_ruin(monkeypatch)
    optim = OptimConfig(lr=RUINOUS, decay_steps=100, warmup_steps=1, on_non_finite="skip")
    worker = start(optim=optim, train=make_train(100, save_every=50))
    worker.ranks.notices = Notices(is_told=lambda: worker.step >= 4)
    worker.run()
    latest = find_saved(tmp_path, provisional=True)
    assert worker.end == TOLD and latest is not None and latest.step == 4 and latest.unevaluated is not None
    with pytest.raises(TrainingError, match=r"after step 4 the held-out loss is \S+, so the weights are not kept"):
        start(optim=optim, train=make_train(100, save_every=50)).run()
    assert list_saved(tmp_path) == []


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_skipped_step_puts_its_checkpoint_off(start: Start, tmp_path: Path, reads_late: bool) -> None:
    worker = start(optim=OptimConfig(decay_steps=16, warmup_steps=1, on_non_finite="skip"))
    worker.records.reads_late = reads_late
    embeddings = cast(Any, worker.engine._deepspeed).module.model.bert.embeddings
    embeddings.register_forward_hook(lambda _, __, output: output * (math.nan if worker.step in (4, 5) else 1.0))
    worker.run(8)
    assert [record.get("train/skipped") for record in read_records(tmp_path)][5:8] == [1, 1, 0]
    assert list_saved(tmp_path) == [7, 8], "5 is due, 5 and 6 are skipped; the last one is the end"


def hold_files(monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], None]) -> list[tuple[int, str]]:
    """Have the disk call `hold` before it takes a file of a checkpoint; return step and name of those it has taken."""
    flush, taken = storage.flush_files, list[tuple[int, str]]()

    def flush_slowly(*paths: Path) -> None:
        for path in paths:
            if path.is_file() and (step := re.match(r"step-(\d+)", path.parent.name)):
                hold(path)
                taken.append((int(step[1]), path.name.split(".")[1]))
        flush(*paths)

    monkeypatch.setattr(storage, "flush_files", flush_slowly)
    return taken


def test_training_goes_on_while_a_checkpoint_is_written(
    start: Start, task: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps are made before the first of its files is there; it has the weights of its own step."""
    start(train=make_train(save_every=100)).run(5)
    straight = (tmp_path / "checkpoints" / "step-00000005-0001").rename(tmp_path / "straight")
    (tmp_path / "checkpoints").rename(tmp_path / "before")
    begun, ended = threading.Event(), threading.Event()

    def hold(path: Path) -> None:
        begun.set()
        assert ended.wait(60)

    hold_files(monkeypatch, hold)
    worker = start()
    steps: list[int] = []
    worker.report = lambda record: steps.append(record["step"])
    assert worker.log is not None
    write = worker.log.write

    def look(record: dict[str, Any]) -> None:
        write(record)
        if record["step"] == 8:
            assert begun.wait(60) and list_saved(tmp_path) == []
            ended.set()

    worker.log.write = look  # type: ignore[method-assign]
    worker.run(9)
    assert steps == [5, 9] and list_saved(tmp_path) == [5, 9]
    saved = tmp_path / "checkpoints" / "step-00000005-0002"
    for name in ("tensors", "moments"):
        assert (saved / f"{name}.safetensors").read_bytes() == (straight / f"{name}.safetensors").read_bytes()


def test_a_save_waits_for_the_one_before_it_and_says_so(
    start: Start, task: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domext_ray.training.saver.SAID_SECONDS", 0.1)
    taken = hold_files(monkeypatch, lambda path: time.sleep(0.5 if path.suffix == ".safetensors" else 0.0))
    start(train=make_train(save_every=2)).run(6)
    files = ("tensors", "moments", "manifest")
    evaluated = (6, "manifest")  # the end's, which no longer says that an evaluation is to come
    assert taken == [*((step, name) for step in (2, 4, 6) for name in files), evaluated]
    assert find_saved(tmp_path).step == 6
    said = [event.text for event in EventReader(Place(tmp_path), from_start=True).read()]
    waited = [re.fullmatch(r"waited (\d+\.\d) s for the checkpoint of step (\d) to be written", text) for text in said]
    assert [int(match[2]) for match in waited if match] == [2, 4, 6]
    assert all(float(match[1]) >= 0.1 for match in waited if match)
    assert [text for text in said if text.startswith("writing")] == [
        f"writing the checkpoint of step {step}" for step in (2, 4, 6)
    ]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    worker = start()
    worker.run(3)
    hold_files(monkeypatch, refuse)
    with pytest.raises(
        StorageError, match=r"checkpoint of step 5 cannot be written to .*No space left on device.*before"
    ):
        worker.run()
    assert 5 <= read_steps(tmp_path)[-1] <= 10 and list_saved(tmp_path) == [3]
    monkeypatch.undo()
    assert start().step == 3


def test_one_that_dies_while_it_writes_leaves_the_checkpoint_before(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was only frozen, and comes back when another attempt has gone on, replaces nothing."""
    begun, ended = threading.Event(), threading.Event()

    def hold(path: Path) -> None:
        if path.parent.name == "step-00000005-0001":
            begun.set()
            assert ended.wait(60)

    first = start()
    first.run(3)
    hold_files(monkeypatch, hold)
    first.time_steps(2)
    first._save({})
    assert begun.wait(60)
    second = start()
    assert second.step == 3
    second.run()
    checkpoints = sorted((tmp_path / "checkpoints").glob("*/manifest.json"))
    ended.set()
    with pytest.raises(RunError):
        first.saver.finish()
    assert sorted((tmp_path / "checkpoints").glob("*/manifest.json")) == checkpoints
    assert find_saved(tmp_path).step == 16 and read_steps(tmp_path) == list(range(17))


def test_a_run_without_a_masked_token_stops(start: Start, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no token was masked in 16 steps .* \(1e-09\) is too low"):
        start(objective=ObjectiveConfig(mask_prob=1e-9)).run()
    assert read_steps(tmp_path) == list(range(16)) and list_saved(tmp_path) == [10, 15]


def test_a_request_to_stop_saves_at_the_next_step_and_loses_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domext_ray.training.metrics.CHECK_REST", 0.0)  # a slow look is no reason to wait a step
    start().run()
    undisturbed = read_progress(tmp_path)
    kept = load_file(tmp_path / "checkpoints" / "step-00000016-0001" / "tensors.safetensors")
    for path in (tmp_path / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    worker = start()
    worker.records.reads_late = True  # as on a GPU; what is written is the same
    worker.run(6)
    assert worker.run_dir.fence is not None
    Attempt(Place(tmp_path), worker.run_dir.fence.number).ask_to_end()
    worker.run()
    assert read_steps(tmp_path)[-1] == list_saved(tmp_path)[-1] == 7
    worker = start()
    assert worker.step == 7
    worker.run()
    assert read_progress(tmp_path) == undisturbed
    tensors = find_saved(tmp_path).state.tensors
    assert all(torch.equal(tensors[name].param, value) for name, value in kept.items())


def test_a_rank_that_hears_that_its_machine_goes_saves_and_says_why(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = start(), list[int]()
    worker.ranks.notices = Notices(is_told=lambda: worker.step >= 3)
    worker.run()
    assert (worker.end, list_saved(tmp_path)) == (TOLD, [3])

    def is_taken() -> bool:
        asked.append(worker.step)
        return worker.step >= 6

    monkeypatch.setattr("domext_ray.training.ranks.ASK_SECONDS", 0.0)
    worker = start()
    worker.ranks.notices = Notices(is_taken=is_taken)
    worker.run()
    assert (worker.end, list_saved(tmp_path)[-1], asked) == (TAKEN, 6, [3, 4, 5, 6])
    monkeypatch.setattr("domext_ray.training.ranks.ASK_SECONDS", 3600.0)
    worker, asked[:] = start(), []
    worker.ranks.notices = Notices(is_taken=is_taken)
    worker.run()
    assert (worker.end, asked) == (TAKEN, [6]), "the first look is before the first step"
    worker = start()
    worker.run()
    assert (worker.end, read_steps(tmp_path)) == (LIMIT, [*range(17)])


def test_a_phase_of_long_rows_begins_with_the_first_of_its_order(start: Start, task: Run) -> None:
    """And it goes on anywhere: the same corpus in both phases, of 12 steps and of 4."""
    worker = start()
    config = replace(task.config, train=make_train(long_seq_length=64, long_frac=0.25))
    phases = make_phases(config, [[task.inputs.domain]] * 2)
    maker = BatchMaker(config, phases, worker.tokenizer, worker.tokenizer)

    def read(first: int, end: int) -> list[torch.Tensor]:
        batches = maker.make(first, rank=0, world_size=1)
        return [torch.cat([part.input_ids for part in parts]) for parts, _ in islice(batches, end - first)]

    undisturbed = read(0, 15)
    assert torch.equal(undisturbed[12], undisturbed[0]) and not torch.equal(undisturbed[12], undisturbed[1])
    for first in (11, 13):
        assert all(map(torch.equal, read(first, 15), undisturbed[first:]))


def test_a_file_that_cannot_grow_is_one_sentence(start: Start, tmp_path: Path) -> None:
    worker = start()
    worker.run(2)
    says = r"metrics\.jsonl cannot be .* \(File too large\): lift the limit"
    with pytest.raises(StorageError, match=says), limit_files((tmp_path / "metrics.jsonl").stat().st_size + 100):
        worker.run()


@pytest.fixture(scope="module")
def mixed(task: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The task with general text beside its corpus."""
    folder = tmp_path_factory.mktemp("mixed")
    general = ReplayConfig(corpus=str(write_corpus(folder / "general.txt", 300, seed=9)), frac=0.3)
    config = replace(task.config, replay=general, run=replace(task.config.run, name="mixed"))
    return prepare_run(resolve(config))


def read_figures(run_dir: Path, *names: str) -> list[list[Any]]:
    records = [record for record in read_records(run_dir) if names[0] in record]
    return [[record[name] for name in names] for record in records]


@pytest.mark.parametrize(("threshold", "step"), [(-math.inf, 16), (math.inf, 0)])
def test_the_last_evaluation_asks_the_router(threshold: float, step: int, mixed: Run, tmp_path: Path) -> None:
    """One that sends every row to the adapter gives the model's figures, one that sends none the base's."""
    words = load_base(mixed.config.base).config.vocab_size
    table = torch.zeros(words + ROUTER_PAIRS, dtype=torch.int32)
    save_routers(Place(tmp_path), {mixed.config.method.adapter: (table, RouterRecord(threshold, 1.0, 0.0))})
    train_in_cuts(mixed, tmp_path, 16)
    records = {record["step"]: record for record in read_records(tmp_path)}
    names = ["domain_mlm_loss", "domain_mlm_accuracy", "domain_bits_per_character", "domain_word_bits_per_character"]
    for name in (*names, "general_mlm_accuracy"):
        assert records[16][f"eval/routed_{name}"] == pytest.approx(records[step][f"eval/{name}"], rel=1e-5)
    assert records[16]["eval/domain_mlm_loss"] != pytest.approx(records[0]["eval/domain_mlm_loss"], rel=1e-5)
    routed = measure_run(list(records.values()))["routed"]
    assert routed["domain"]["mlm_loss"] == records[16]["eval/routed_domain_mlm_loss"]
    assert [record for record in records.values() if "eval/routed_domain_mlm_loss" in record] == [records[16]]


def test_the_last_evaluation_waits_for_a_router_that_comes(
    mixed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said what is waited for; one that does not come ends the run, which goes on from its last step."""
    monkeypatch.setattr("domext_ray.training.measures.ROUTER_LOOK_SECONDS", 0.01)
    run = replace(mixed, awaits_router=True)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="was not fitted within 0 s after the last step"):
        patch.setattr("domext_ray.training.measures.ROUTER_SECONDS", 0.0)
        train_in_cuts(run, tmp_path, 16)
    table = torch.zeros(load_base(run.config.base).config.vocab_size + ROUTER_PAIRS, dtype=torch.int32)

    def count_waits() -> int:
        said = [event.text for event in EventReader(Place(tmp_path), from_start=True).read()]
        return said.count("waiting for the router, which the job's own process fits")

    def fit() -> None:
        while count_waits() < 2:
            time.sleep(0.01)
        save_routers(Place(tmp_path), {run.config.method.adapter: (table, RouterRecord(math.inf, 1.0, 0.0))})

    threading.Thread(target=fit, daemon=True).start()
    train_in_cuts(run, tmp_path, 16)
    assert "eval/routed_domain_mlm_loss" in read_records(tmp_path)[-1]


def note_batches(worker: PretrainWorker, steps: list[int]) -> None:
    """Add to `steps` the step of each batch that evaluations score."""
    score = worker.engine.evaluate

    def evaluate(batch: Any) -> torch.Tensor:
        steps.append(worker.step)
        return score(batch)

    worker.engine.evaluate = evaluate  # type: ignore[method-assign]


def train_routed(run: Run, folder: Path, *cuts: int, forgets: bool = False) -> tuple[dict[str, Any], int]:
    """Figures with a router that divides rows, and batches that the evaluation of the last step scored."""
    words = load_base(run.config.base).config.vocab_size
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(-1000, 1000, (words + ROUTER_PAIRS,), generator=draw, dtype=torch.int32)
    folder.mkdir()
    save_routers(Place(folder), {run.config.method.adapter: (table, RouterRecord(0.0, 1.0, 0.0))})
    scored = list[int]()
    with attempts() as begin:
        for cut in cuts:
            worker = begin(run, folder)
            worker.measures.of_base = {} if forgets else worker.measures.of_base
            note_batches(worker, scored)
            worker.run(cut)
    record = read_records(folder)[-1]
    figures = {name: value for name, value in record.items() if name.startswith("eval/routed_")}
    assert len(figures) == 5 and figures != {name: record[name.replace("routed_", "")] for name in figures}
    return figures, scored.count(cuts[-1])


def test_what_was_scored_is_not_scored_again(mixed: Run, tmp_path: Path) -> None:
    """With the router only routes are new, also after a resumption; what is gone, or is of other rows, is scored."""
    straight, num_batches = train_routed(mixed, tmp_path / "straight", 16)
    assert train_routed(mixed, tmp_path / "cut", 7, 16) == (straight, num_batches)
    anew, num_more = train_routed(mixed, tmp_path / "gone", 7, 16, forgets=True)
    assert anew == pytest.approx(straight, rel=1e-5) and num_more > num_batches
    fewer = replace(mixed.config.train, eval_rows=2)
    with attempts() as begin:
        assert begin(mixed, tmp_path / "cut").measures.of_base.keys() == SETS.keys()
        assert begin(mixed, tmp_path / "cut", train=fewer).measures.of_base.keys() == {"general"}


def test_packed_rows_train_and_go_on_exactly(task: Run, mixed: Run, tmp_path: Path) -> None:
    """Beside general rows that the base is asked for; what is read of a document does not depend on its neighbours."""
    train = replace(mixed.config.train, seq_length=64, dropout=0.0)
    config = replace(mixed.config, prepare=replace(mixed.config.prepare, packed=True), train=train)
    packed = prepare_run(resolve(config))
    assert packed.inputs.domain.folder != task.inputs.domain.folder, "packed rows are another corpus"
    train_in_cuts(packed, tmp_path / "straight", 16)
    worker = train_in_cuts(packed, tmp_path / "cut", 7, 16)
    names = ("train/mlm_loss", "train/keep_loss", "train/keep_tokens", "train/replay_epochs")
    straight, cut = (read_figures(tmp_path / folder, *names) for folder in ("straight", "cut"))
    assert straight == cut and len(cut) == 16 and sum(figures[2] > 0 for figures in cut) > 8
    assert cut[0][1] == pytest.approx(0.0, abs=1e-6), "the base reads packed rows as the model does"
    assert cut[-1][1] > 0 and cut[-1][3] > 0
    batch = worker.measures.sets.domain.batches[0]
    assert batch.document_ids is not None and int(batch.document_ids.max()) > 1
    assert torch.equal(batch.document_ids, (batch.input_ids == worker.tokenizer.cls_token_id).cumsum(1))


def test_an_objective_of_vectors_goes_on_exactly_and_names_its_figures(task: Run, tmp_path: Path) -> None:
    """With titles and bodies, which are both read."""
    sentences = Path(task.config.corpus).read_text().splitlines()
    rows = [{"title": sentence[:20], "body": sentence} for sentence in sentences]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective = ObjectiveConfig(kind="infonce", group_rows=2)
    prepare = replace(task.config.prepare, pair=("title", "body"))
    config = replace(task.config, objective=objective, corpus=str(tmp_path / "rows.jsonl"), prepare=prepare)
    made = prepare_run(resolve(config))
    names = ("train/infonce_loss", "train/compared_rows", "train/tokens")
    train_in_cuts(made, tmp_path / "straight", 16)
    worker = train_in_cuts(made, tmp_path / "cut", 7, 16)
    straight, cut = (read_figures(tmp_path / folder, *names) for folder in ("straight", "cut"))
    assert straight == cut and len(cut) == 16
    assert all(figures[1] == 4 for figures in cut)
    records = read_records(tmp_path / "cut")
    assert not any("mlm_loss" in name or name == "train/masked_tokens" for record in records for name in record)
    measured = measure_run(records)
    loss, share = (measured["domain"][f"infonce_{name}"] for name in ("loss", "accuracy"))
    assert loss["after"] < loss["before"] and 0 <= share["after"] <= 1
    assert made.spec.counts.trainable == sum(
        param.numel() for param in worker.model.parameters() if param.requires_grad
    )


def test_word_bits_are_measured_at_the_start_and_at_the_end(start: Start, task: Run, tmp_path: Path) -> None:
    worker = start(train=make_train(6, evaluate_every=2))
    worker.run(4)
    name, records = "eval/domain_word_bits_per_character", read_records(tmp_path)
    assert [record["step"] for record in records if name in record] == [0]
    worker.run()
    records = [record for record in read_records(tmp_path) if "eval/domain_mlm_loss" in record]
    assert [record["step"] for record in records] == [0, 2, 4, 6]
    assert [record["step"] for record in records if record.get(name, 0) > 0] == [0, 6]
    bits = measure_run(records)["domain"]["word_bits_per_character"]
    assert bits == {"before": records[0][name], "after": records[-1][name]}
    events = [json.loads(line).get("phase", "") for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [phase.partition(": ")[2] for phase in events if phase.startswith("evaluating step 6")] == [
        *("held-out text", "the general probe", "bits per character", "word bits per character")
    ], "a driver that sees these does not say that nothing has moved"


def test_the_base_itself_is_measured_where_a_model_begins_otherwise(task: Run, tmp_path: Path) -> None:
    """With new words on what compares between vocabularies, cut as the base does; with modules on all."""
    text = Path(task.config.corpus).read_text(encoding="utf-8")
    (tmp_path / "new.txt").write_text(re.sub(r"(\w{5,})", r"\1ly", text), encoding="utf-8")
    config = replace(task.config, corpus=str(tmp_path / "new.txt"), run=replace(task.config.run, name="plain"))
    method = MethodConfig(heads=0, ffn_units=8, trains="extensions")
    vocab = replace(config.vocab, size=40, min_frequency=1)
    with_words = replace(config, vocab=vocab, method=method, run=replace(config.run, name="words"))
    plain, extended = (prepare_run(resolve(each)) for each in (config, with_words))
    words = ["domain_bits_per_character", "domain_word_bits_per_character", "general_mlm_accuracy", "general_words"]
    every = [*words, "domain_mlm_loss", "domain_mlm_accuracy"]
    with attempts() as begin:
        start = begin(plain, tmp_path / "plain").measures.evaluate(0)
        assert not any("base" in name for name in start)
        for run, own, asked in (
            (extended, method, words),
            (plain, replace(method, module_hidden_size=8, module_ffn_size=8), every),
            (plain, MethodConfig(heads=1, ffn_units=8, init="paper"), every),
        ):
            record = begin(run, tmp_path / "other", method=own).measures.evaluate(0)
            base = {name: record[f"eval/base_{name}"] for name in every}
            assert [base[name] for name in asked] == pytest.approx([start[f"eval/{name}"] for name in asked])
            assert all(math.isnan(value) == (name not in asked) for name, value in base.items())
            assert record["eval/domain_bits_per_character"] != pytest.approx(base["domain_bits_per_character"])
        sets = begin(plain, tmp_path / "pairs").measures.sets
    of_pairs = replace(plain.config, objective=ObjectiveConfig(next_sentence=True))
    found = build_base_evaluations(of_pairs, load_base(config.base), plain.inputs.domain, sets, 4, new_words=False)
    assert found == replace(sets, domain=NOTHING), "the base alone does not tell the order of pairs"


def test_a_run_limited_by_tokens_or_seconds_ends_near_rate_0(start: Start, tmp_path: Path) -> None:
    """Its horizon in steps is far away; the schedule sees which limit is near."""
    optim = OptimConfig(lr=1e-3, schedule="wsd", decay_frac=0.5, decay_steps=10_000, warmup_steps=1)
    start(optim=optim, train=make_train(10_000, evaluate_every=10_000, max_tokens=2000)).run()
    records = [record for record in read_records(tmp_path) if "train/lr" in record]
    rates, spent = [record["train/lr"] for record in records], [record["train/tokens"] / 2000 for record in records]
    assert spent[-1] >= 1 > spent[-2] and len(rates) < 40
    assert rates[1:] == pytest.approx([1e-3 * min(1.0, (1 - done) / 0.5) for done in spent[:-1]])
    assert rates[-1] < 2e-4 < rates[1] == 1e-3


def test_a_run_limited_by_seconds_goes_on_with_its_clock(start: Start, tmp_path: Path) -> None:
    """Seconds of training count over all attempts, and so does the share of them at which the rate falls."""
    optim = OptimConfig(lr=1e-3, schedule="wsd", decay_frac=0.5, decay_steps=10**7, warmup_steps=1)
    train = make_train(10**7, save_every=10**7, evaluate_every=10**7)
    first = start(optim=optim, train=train)
    first.run(9)
    limit = 2 * first.records.seconds
    second = start(optim=optim, train=replace(train, max_seconds=limit))
    assert second.records.seconds == first.records.seconds > 0
    said = [event.text for event in EventReader(Place(tmp_path), from_start=True).read()]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert [text for text in said if "step 9" in text and "going" in text] == [f"going on from step 9: {saved}"]
    second.run()
    records = [record for record in read_records(tmp_path) if "train/lr" in record]
    spent = [record["time/seconds"] for record in records]
    assert spent[8] == first.records.seconds and spent == sorted(spent) and spent[-1] >= limit > spent[-2]
    rates = [record["train/lr"] for record in records]
    assert rates[9:] == pytest.approx([1e-3 * (1 - done / limit) / 0.5 for done in spent[8:-1]])
    assert rates[:9] == [1e-3] * 9 and read_steps(tmp_path) == list(range(len(records) + 1))


def test_a_cadence_of_time_goes_by_the_runs_clock(start: Start, task: Run, tmp_path: Path) -> None:
    """Each multiple of the time is followed by an evaluation, in a run that goes on, too; none is made twice."""
    train = make_train(12, evaluate_every="0.01s", save_every="0.03s")
    start(train=train).run(6)
    start(train=train).run()
    records = [record for record in read_records(tmp_path) if record["step"]]
    clock = [0.0, *(record["time/seconds"] for record in records)]
    due = [i for i in range(1, 13) if clock[i] // 0.01 > clock[i - 1] // 0.01]
    assert len(records) == 12 and clock == sorted(clock)
    evaluated = [record["step"] for record in records if "eval/domain_mlm_loss" in record]
    assert evaluated == sorted({*due, 6, 12}) and len(due) > 2
