"""Routers learned from made text: what they keep and take, where they are stored, and what is said of them."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import make_tiny_base
from helpers.file_limits import limit_files
from safetensors.torch import save
from small_runs import hold
from test_bank import make_run

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig, ReplayConfig
from domext_ray.errors import RunError, StorageError
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.configuration_domext import AdapterConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS, ROUTER_SKIPS, Router
from domext_ray.models.source import open_model
from domext_ray.pretraining.plan import size_model
from domext_ray.runs.events import EventReader
from domext_ray.runs.run_directory import RunPaths
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import FileRecord, Manifest
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training import router as router_room
from domext_ray.training.checkpoint import Checkpoint
from domext_ray.training.router import (
    RouterRecord,
    attach_routers,
    choose_threshold,
    describe_router,
    fit_beside,
    fit_router,
    get_or_train_routers,
    read_records,
    read_routers,
    save_routers,
)
from domext_ray.training.run import Inputs, Run, Start
from domext_ray.training.start import rebuild_run

OWN, COMMON, OTHER = range(60, 100), range(100, 180), range(180, 220)
METHOD = MethodConfig(adapter="clinic", heads=1, ffn_units=6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return load_base(str(make_tiny_base(tmp_path_factory.mktemp("bases") / "tiny")))


def write_text(folder: Path, words: range, seed: int = 0, sizes: tuple[int, int] = (300, 80)) -> Manifest:
    """A prepared corpus, a third of whose words are its own, the others anybody's."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    shards = []
    for split, number in zip(("train", "held_out"), sizes, strict=True):
        rows = []
        for _ in range(number):
            size = draw.integers(12, 60)
            is_own = draw.random(size) < 0.33
            rows.append([2, *np.where(is_own, draw.choice(words, size), draw.choice(COMMON, size)).tolist(), 3])
        path = folder / f"{split}-000000.arrow"
        table = pa.table({"input_ids": pa.array(rows, type=pa.list_(pa.int32()))})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        shards.append((FileRecord(path.name, "", number, sum(map(len, rows))),))
    return Manifest(Place(folder), "f", 64, "t", {}, *shards, 1, {})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Manifest]:
    folder = tmp_path_factory.mktemp("texts")
    return write_text(folder / "domain", OWN), write_text(folder / "general", OTHER, seed=1)


def fit(base: Base, texts: tuple[Manifest, Manifest], seed: int = 0) -> tuple[torch.Tensor, RouterRecord]:
    return fit_router(*texts, load_tokenizer(base.folder), base.config.vocab_size, seed)


@pytest.fixture(scope="module")
def fitted(base: Base, texts: tuple[Manifest, Manifest]) -> tuple[torch.Tensor, RouterRecord]:
    return fit(base, texts)


def test_domain_text_is_kept_and_general_text_is_left(
    base: Base, texts: tuple[Manifest, Manifest], fitted: tuple[torch.Tensor, RouterRecord]
) -> None:
    table, record = fitted
    assert table.dtype == torch.int32 and len(table) == base.config.vocab_size + ROUTER_PAIRS
    assert record.kept >= 0.9 and record.taken <= 0.05
    assert (table[list(OWN)] > table[list(COMMON)].max()).float().mean() > 0.9
    assert (table[list(OTHER)] < table[list(COMMON)].min()).float().mean() > 0.9
    again, same = fit(base, texts)
    assert torch.equal(table, again) and record == same


def test_the_seed_draws_rows_and_the_domain_has_four_times_the_general_ones(
    base: Base, texts: tuple[Manifest, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [
        [tuple(row) for row in router_room._read_rows(texts[0], "train", most, seed)]
        for most, seed in ((300, 0), (50, 0), (50, 0), (50, 1), (1000, 1))
    ]
    every, few, same, other, most = drawn
    assert len({*few}) == len({*other}) == 50 and few == same != other and most == every
    assert [row for row in every if row in few] == few, "they stay in their order"
    numbers, fit_table = list[tuple[int, int]](), router_room._fit_table

    def look(domain: router_room.Rows, general: router_room.Rows, counts: np.ndarray) -> torch.Tensor:
        numbers.append((len(domain), len(general)))
        return fit_table(domain, general, counts)

    monkeypatch.setattr(router_room, "_fit_table", look)
    fit(base, (texts[0], write_text(tmp_path / "little", OTHER, sizes=(20, 20))))
    fit(base, texts)
    assert numbers == [(3 * 80, 3 * 20), (3 * 300, 3 * 300)], "a row, and two pieces of it"


def test_the_threshold_keeps_a_share_of_the_domain_and_more_where_it_stands_apart() -> None:
    domain = np.linspace(0, 10, 1001)
    near, far, empty = np.linspace(-5, 5, 1001), np.linspace(-9, -5, 1001), np.full(9, -np.inf)
    assert choose_threshold(domain, near) == pytest.approx(0.3, abs=0.02), "97 % of the domain's text"
    assert choose_threshold(domain, empty) == pytest.approx(0.3, abs=0.02)
    assert choose_threshold(domain, far) == pytest.approx((0.3 - 5) / 2, abs=0.02), "halfway to 99.7 % of general text"


def test_beside_written_text_rows_that_the_base_refilled_are_general_and_the_domain_sets_the_threshold(
    base: Base, texts: tuple[Manifest, Manifest], fitted: tuple[torch.Tensor, RouterRecord]
) -> None:
    tokenizer, num_words = load_tokenizer(base.folder), base.config.vocab_size
    table, record = fit_router(*texts, tokenizer, num_words, 0, base)
    assert (record.written, fitted[1].written) == (True, False) and record.kept >= 0.9
    assert record.threshold > fitted[1].threshold, "general text that stands apart lowers it, written text does not"
    unseen = sorted({*range(num_words)} - {*OWN, *COMMON, *OTHER, *tokenizer.all_special_ids})
    assert (table[unseen] < fitted[0][unseen]).float().mean() > 0.9, "words that only the base writes are general"


def test_shares_are_those_of_texts_that_cannot_be_told_apart(
    base: Base, texts: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured on the other half; nothing is hidden where the general text is the domain's."""
    alike = texts[0], replace(texts[0], train=texts[0].held_out)
    assert fit(base, alike)[1].taken > 0.8
    monkeypatch.setattr(router_room, "KEPT_FRAC", 0.5)
    record = fit(base, alike)[1]
    assert abs(record.kept - 0.5) < 0.2 and abs(record.taken - 0.5) < 0.3
    monkeypatch.setattr(router_room, "LEFT_FRAC", 0.0)  # so the threshold is halfway down to the lowest
    assert fit(base, texts)[1].kept == 1.0


def test_special_and_unknown_words_do_not_count(base: Base, fitted: tuple[torch.Tensor, RouterRecord]) -> None:
    table = fitted[0]
    num_words = base.config.vocab_size
    specials = load_tokenizer(base.folder).all_special_ids
    assert (table[:num_words] == ROUTER_SKIPS).nonzero().flatten().tolist() == sorted(specials)
    router = Router(AdapterConfig(router_words=num_words))
    router.weight.copy_(table)
    row = torch.tensor([[70, 71, 110, 75]])
    around = torch.tensor([[2, 70, 71, 110, 75, 3, 0, 0], [num_words + 3, 70, 71, 110, 75, num_words, 4, 1]])
    assert router(row).expand(2).equal(router(around))
    assert router(torch.tensor([[2, 3, 0], [num_words, 4, 0]])).tolist() == [-torch.inf, -torch.inf]
    parts = [table[place].item() for place in (70, 71, 110, 75)]
    pairs = [(first * 48_271 + second) % 65_521 for first, second in ((70, 71), (71, 110), (110, 75))]
    parts += [table[num_words + place].item() for place in pairs]
    assert router(row).item() == pytest.approx(sum(parts) * 1e-4 / 4, abs=1e-12)


def plan_fit(base: Base, run_dir: Path, texts: tuple[Manifest, Manifest | None], start: Path | None = None) -> Run:
    domain, general = texts
    replay = ReplayConfig(corpus="general.txt" if general else "")
    config = PretrainConfig(base=str(base.folder), method=METHOD, replay=replay)
    paths = RunPaths(Place(run_dir), domain.folder.parent, run_dir)
    inputs = Inputs(Place(run_dir / "tokenizer"), ((domain, general) if general else (domain,),))
    started = Start(Place(start), Checkpoint(Place(start), 1, 1, {}, {}, {}), "") if start else None
    return Run(config, paths, size_model(config, base), started, inputs=inputs)


def test_it_is_fitted_while_the_run_trains_and_what_is_there_stays(
    base: Base, texts: tuple[Manifest, Manifest], fitted: tuple[torch.Tensor, RouterRecord], tmp_path: Path
) -> None:
    make_run(base, tmp_path, METHOD)
    run = plan_fit(base, tmp_path, texts)
    with fit_beside(run) as own:
        assert own.awaits_router
    assert torch.equal(read_routers(Place(tmp_path))["clinic"][0], fitted[0]), "as in the main thread"
    save_routers(Place(tmp_path), {"clinic": (torch.zeros_like(fitted[0]), fitted[1])})
    with fit_beside(run) as own:
        assert own is run
    assert not read_routers(Place(tmp_path))["clinic"][0].any()


def test_a_fit_that_fails_shuts_the_workers_out_and_is_what_the_job_ends_with(
    base: Base, texts: tuple[Manifest, Manifest], tmp_path: Path
) -> None:
    make_run(base, tmp_path, METHOD)
    run = hold(plan_fit(base, tmp_path, texts), tmp_path)
    of_worker, ends = pickle.loads(pickle.dumps(run.paths.run)), time.monotonic() + 120
    says = r"router\.safetensors cannot be .* \(File too large\)"
    with pytest.raises(StorageError, match=says), limit_files(100_000), fit_beside(run):
        while time.monotonic() < ends:
            of_worker.check()
            time.sleep(0.01)


def test_a_fit_is_broken_off_with_its_run(
    base: Base, texts: tuple[Manifest, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(base, tmp_path, METHOD)
    run = plan_fit(base, tmp_path, texts)

    def fit_on(*given: Any) -> None:
        while True:
            given[-1]()

    monkeypatch.setattr(router_room, "fit_router", fit_on)
    with pytest.raises(KeyboardInterrupt), fit_beside(run):
        raise KeyboardInterrupt
    assert "router" not in [thread.name for thread in threading.enumerate()] and not read_routers(Place(tmp_path))
    monkeypatch.undo()
    asked = list[str]()

    def listen() -> None:
        asked.append("")
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_router(*texts, load_tokenizer(base.folder), base.config.vocab_size, 0, base, listen)
    assert len(asked) == 3, "between batches of rows that the base writes"


def test_an_export_has_the_run_s_router(base: Base, texts: tuple[Manifest, Manifest], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(base, run_dir, METHOD)
    get_or_train_routers(plan_fit(base, run_dir, texts))
    table, record = read_routers(Place(run_dir))["clinic"]
    said = [event.text for event in EventReader(Place(run_dir), from_start=True).read()]
    assert said == [f"router: {describe_router(PretrainConfig(method=METHOD), asdict(record))}"]
    ids, names = torch.tensor([[2, *OWN[:8], 3], [2, *OTHER[:8], 3]]), ["clinic", "__base__"]
    assert rebuild_run(Place(run_dir)).model.bert.route(ids) == names
    sources = [run_dir, tmp_path / "export", tmp_path / "rounded"]
    for export, dtype in zip(sources[1:], (torch.float32, torch.bfloat16), strict=True):
        export_run(Place(run_dir), Place(export), dtype)
        loaded: Any = DomextForMaskedLM.from_pretrained(export).eval()
        assert torch.equal(loaded.bert.router.adapters["clinic"].weight, table)
        assert loaded.config.adapters["clinic"].router_threshold == record.threshold
        assert loaded.bert.route(ids) == names
        with torch.no_grad():
            assert torch.equal(loaded(ids, adapter_names="auto").logits, loaded(ids, adapter_names=names).logits)
    for source in sources:  # as fine-tuning and measuring read them
        assert torch.equal(open_model(str(source)).load().tensors["bert.router.adapters.clinic.weight"].int(), table)


def test_without_general_text_there_is_none_and_it_is_said(
    base: Base, texts: tuple[Manifest, Manifest], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    make_run(base, run_dir, METHOD)
    get_or_train_routers(plan_fit(base, run_dir, (texts[0], None)))
    assert not (run_dir / "router.safetensors").exists() and read_records(Place(run_dir)) == {} == read_routers(
        Place(run_dir)
    )
    export_run(Place(run_dir), Place(tmp_path / "export"))
    sentence = "none, as no general text was given (--replay.corpus)"
    assert f"| Router | {sentence} |" in (tmp_path / "export" / "README.md").read_text()
    loaded: Any = DomextForMaskedLM.from_pretrained(tmp_path / "export")
    with pytest.raises(ValueError, match="no adapter of the model has a router; a run with general text"):
        loaded(torch.tensor([[2, 70, 3]]), adapter_names="auto")


def test_routers_of_the_run_before_come_along(
    base: Base, texts: tuple[Manifest, Manifest], fitted: tuple[torch.Tensor, RouterRecord], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for run_dir in (first, second):
        make_run(base, run_dir, METHOD)
    save_routers(Place(first), {"law": fitted})
    get_or_train_routers(plan_fit(base, second, texts, first))
    assert read_records(Place(second)).keys() == {"law", "clinic"}
    assert torch.equal(read_routers(Place(second))["law"][0], fitted[0])
    with pytest.raises(RunError, match="does not fit the run's model"):
        attach_routers(rebuild_run(Place(tmp_path / "first")).model, Place(second))


def test_what_is_said_follows_the_run() -> None:
    record = {"threshold": 1.234, "kept": 0.9712, "taken": 0.0049, "written": False}
    config = PretrainConfig(method=METHOD, replay=ReplayConfig(corpus="general.txt"))
    assert describe_router(config, None) == "", "it is fitted at the end"
    assert describe_router(config, record) == (
        "gives the adapter 97.1% of held-out domain text and 0.5% of held-out general text, at the threshold 1.23"
    )
    assert describe_router(config, {**record, "written": True}) == (
        "gives the adapter 97.1% of held-out domain text and 0.5% of held-out text that the base wrote, at the "
        "threshold 1.23; fitted without general text"
    )
    full = replace(config, method=MethodConfig(name="full", trains="all", heads=0, ffn_units=0))
    assert describe_router(replace(full, replay=ReplayConfig()), None) == ""


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    table, record = {"clinic": torch.zeros(9, dtype=torch.int32)}, '{"threshold": 1, "kept": 1, "taken": 0}'
    for content in (
        save(table, {"clinic": "{"}),
        save(table, {"clinic": '{"threshold": 1, "kept": 1}'}),
        save(table, {"law": record}),
        save(table),
        save(table, {"clinic": record})[:-1],
        b"x",
    ):
        (tmp_path / "router.safetensors").write_bytes(content)
        with pytest.raises(
            RunError, match=r"router.safetensors is damaged \(.*\); delete it and run the training job again"
        ):
            read_routers(Place(tmp_path))
