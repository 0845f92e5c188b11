"""What runs on a card that is not there (card.py), in a process of its own: who waits for it, by what runs."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from card import Card, Wait, register_card
from finetuned_models import BOTTLENECK, fit
from made_banks import add_drawn, make_bank
from method_runs import MICRO_BATCH, OPTIM, Built, Places, build, describe_model, draw_batches, draw_rows, make_config
from methods import Row, find_row
from torch import nn
from torch.nn.attention import varlen

from domext_ray.config.pretrain import EngineConfig, ObjectiveConfig, PretrainConfig, resolve_micro_batch_sizes
from domext_ray.inference.fill_mask import FillMask
from domext_ray.model import build as build_module
from domext_ray.model import fused
from domext_ray.model.base import load_base
from domext_ray.model.build import describe_extensions, prepare_for_device, store_base
from domext_ray.model.domext.modeling_domext import DomextModel
from domext_ray.models.bank_entry import MASKED_LM
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.mixed_adapters import serve_adapters
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.storage import Place
from domext_ray.text.corpus.views import make_masker
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training import engine as engine_module
from domext_ray.training import records
from domext_ray.training.checkpoint import save_checkpoint
from domext_ray.training.engine import Engine, TensorState, TrainState, join_alone
from domext_ray.training.evaluate import evaluate
from domext_ray.training.losses import make_loss
from domext_ray.training.notices import Notices
from domext_ray.training.objective import to_batch
from domext_ray.training.passages import EvalSet
from domext_ray.training.ranks import Ranks
from domext_ray.training.records import PartFigures, StepRecords
from domext_ray.training.step import SingleProcessTrainer, list_trainables, move_batch
from domext_ray.training.worker import PretrainWorker

Waits = Counter[Wait]


class WithoutDeepSpeed:
    """What the engine asks of DeepSpeed at ZeRO-0 on one rank, where it reduces nothing."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.module, self._optimizer = module, optimizer
        self.train, self.eval = module.train, module.eval
        self.no_sync = contextlib.nullcontext

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        pass


def make_card_engine(model: nn.Module, device: torch.device, objective: Any, precision: Any) -> Engine:
    """Make a run's engine, without DeepSpeed's own."""
    engine_module._initialize = WithoutDeepSpeed  # type: ignore[assignment]
    join_alone()
    return Engine(
        model,
        objective=objective,
        engine=EngineConfig(zero_stage=0, precision=precision, fused=True),  # see `run_fused`
        optim=OPTIM,
        warmup_steps=OPTIM.warmup_steps,
        micro_batch_size=MICRO_BATCH,
        accumulation_steps=2,
        seed=7,
        device=device,
    )


def run_row(row: Row, places: Places, precision: str = "bf16", dropout: float = 0.1) -> dict[str, Waits]:
    """Steps of a method of the matrix."""
    config, built = make_config(row, places), build(row, places, dropout=dropout)
    batches, *_ = draw_batches(row, places, 0)
    return run_steps(config, built, batches, precision)


def run_objective(
    objective: ObjectiveConfig, places: Places, *, packed: bool = False, dropout: float = 0.1
) -> dict[str, Waits]:
    """Steps of another objective, or of packed rows."""
    row = find_row("AF")
    config, base = replace(make_config(row, places), objective=objective), load_base(str(places.base_of(row)))
    spec = describe_model(config, base, places.tokenizer_of(row), dropout)
    model = spec.build()
    masker: Any = make_masker(load_tokenizer(places.tokenizer_of(row)), objective, 3, packed=packed)
    rows = masker.mask(draw_rows(row, places, 0), epoch=0)
    return run_steps(config, Built(model, spec, {}), [to_batch(batch) for batch in masker.collate(rows, MICRO_BATCH)])


def run_varlen(run: Callable[[], dict[str, Waits]]) -> dict[str, Waits]:
    """What runs where attention needs neither masks nor padding, with torch's own kernel on the card."""
    calls, plain, build_masks = [], varlen.varlen_attn, DomextModel._build_masks

    def attend(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return plain(*arguments, **options)

    def mask(model: Any, *arguments: Any) -> Any:
        assert model.training and model.config.attention_probs_dropout_prob, "there is a mask"
        return build_masks(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "pick_attention", lambda *_, **__: "varlen")
        patch.setattr(varlen, "varlen_attn", attend)
        patch.setattr(DomextModel, "_build_masks", mask)
        waits = run()
    assert calls and {call[0].dtype for call in calls} == {torch.bfloat16}
    return waits


def run_fused(run: Callable[[], dict[str, Waits]]) -> dict[str, Waits]:
    """What runs with kernels of our own, each of which is one operation without values."""
    calls, rotate = [], fused.rotate

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return rotate(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "find_fault", lambda device: "")
        patch.setattr(fused, "rotate", count)
        waits = run()
    assert calls
    return waits


def run_steps(config: PretrainConfig, built: Built, batches: list[Any], precision: str = "bf16") -> dict[str, Waits]:
    """A step of two micro batches, and an evaluation of one."""
    device = register_card()
    with Card() as card:
        if precision == "bf16":
            store_base(built.model, torch.bfloat16)
        prepare_for_device(built.model, device, bf16=precision == "bf16")
        model = cast(nn.Module, built.model).to(device)
        objective = make_loss(config, built.base, model, built.fixed, device, resolve_micro_batch_sizes(config))
        engine = make_card_engine(model, device, objective, precision)
        assert len(batches) == 2, "what waits once per micro batch is seen twice"
        worker = make_worker(config, engine, batches)
        worker._train_step()
        card.take_waits()
        worker._train_step()
        waits = {"step": card.take_waits()}
        evaluate(engine, EvalSet(np.arange(MICRO_BATCH), lambda rows: batches[:1]))
        return waits | {"evaluation": card.take_waits()}


def make_worker(config: PretrainConfig, engine: Engine, batches: list[Any]) -> PretrainWorker:
    """Make a rank that steps an engine on the same micro batches again and again: no Ray reads them."""
    records.count_epochs = lambda *_: [0.0, 0.0]  # type: ignore[assignment]
    worker, parts = object.__new__(PretrainWorker), PartFigures(config, [], None)
    parts.describe = lambda *_: {}  # type: ignore[method-assign]
    run: Any = SimpleNamespace(config=config, paths=SimpleNamespace(run=None))
    vars(worker).update(
        config=config,
        engine=engine,
        batches=itertools.repeat((batches, [9, *[0] * (len(parts.names) - 1)])),
        parts=parts,
        log=None,
        rank=0,
        ranks=Ranks(0, engine.sum_over_ranks, Notices()),
        records=StepRecords(run, [], parts, {}, engine.device, 1, 0.0),
        saver=SimpleNamespace(finish=lambda: None),
        step=0,
        clock=0.0,
        tokens=0,
        _ahead=None,
    )
    worker.records.reads_late = True
    return worker


def run_family(family: str, folder: Path, *, head_bilstm: int = 0) -> dict[str, Waits]:
    """Fine-tune, tune on dev and predict: what waits per step, and what else."""
    start, engine = open_model(str(folder)).load(), EngineConfig(precision="bf16")
    steps, plain = list[Waits](), SingleProcessTrainer.train_step

    def train_step(trainer: Any, batches: Any, *arguments: Any) -> Any:
        card.take_waits()
        figures = plain(trainer, [*batches, *batches], *arguments)  # two micro batches
        steps.append(card.take_waits())
        return figures

    with Card() as card, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SingleProcessTrainer, "train_step", train_step)
        task, fitted = fit(
            start, family, BOTTLENECK, family == "normalization", head_bilstm, engine, register_card(), epochs=0.3
        )
        card.take_waits()
        task.run({name: model.predict for name, model in fitted.items()}, task.data.test)
        prediction = card.take_waits()
    step: Waits = Counter()
    for waits in steps:
        step |= waits
    return {"step": step, "prediction": prediction}


def run_bank(folder: Path, root: Path) -> dict[str, Waits]:
    """A mixed pass of a bank's adapters, whose routers choose, with each row's own head."""
    device, bank = register_card(), make_bank(root / "bank", str(folder))
    add_drawn(bank, "all", MASKED_LM, 7, sizes={"heads": 1, "ffn_units": 3, "bottleneck_size": 4, "word_rows": 30})
    draw = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(5, 200, (6, 9), generator=draw), torch.ones(6, 9, dtype=torch.long)
    mask[3, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    names = [*bank.names()[:5], "__base__"]
    with Card() as card:
        server = serve_adapters(bank).to(device)
        own = move_batch(batch, device)
        card.take_waits()
        server(**own, adapter_names=names)
        waits = {"mixed": card.take_waits()}
        server(**own, adapter_names="auto")
        return waits | {"routed": card.take_waits()}


def run_vectors(folder: Path) -> dict[str, Waits]:
    """Vectors of a few texts."""
    embed = TextEmbedding(open_model(str(folder)).load(), layers=(1, 2), normalize=True, device=register_card().type)
    with Card() as card:
        embed(["the drug", "a heart disease of the patient"])
        card.take_waits()
        embed(["the drug", "a heart disease of the patient"])
        return {"vectors": card.take_waits()}


def run_fill_mask(folder: Path) -> dict[str, Waits]:
    """Masks that are filled."""
    model, tokenizer = load_masked_lm(str(folder), "--model")
    with Card() as card:
        cast(nn.Module, model).to(register_card())
        fill = FillMask(model, tokenizer, top_k=3, batch_tokens=512)
        card.take_waits()
        fill.predict(
            [fill.make_example({"text": text}, "text") for text in ("the [MASK] is", "[MASK] [MASK] of a cell")]
        )
        return {"prediction": card.take_waits()}


def save_start(row: Row, places: Places) -> None:
    """Save a row's model as a checkpoint, for the rows that go on from it."""
    built = build(row, places)
    tensors = {
        name: TensorState(param.detach(), torch.zeros_like(param), torch.zeros_like(param))
        for name, param in list_trainables(built.model).items()
    }
    record = {
        "base": "tiny",
        "base_sha256": built.base.sha256,
        "extensions": asdict(describe_extensions(built.model.config)),
    }
    save_checkpoint(
        Place(places.run_of(row) / "checkpoints"), 1, TrainState(tensors, 1), built.fixed, {}, record, keep=1
    )
