"""Everything that computes, on a card against this machine's CPU, without Ray; the tier slow runs it all on the CPU.

A card needs torch, transformers, peft and DeepSpeed beside it. Losses are held against the CPU's within a tolerance:
sums come in another order there, and some are made by atomic additions, in an order that no run has twice.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from captured_steps import record_operations, train_captured
from conftest import REPOSITORY
from finetuned_models import BOTTLENECK, fit
from made_banks import CLASSES, TAGS, make_bank
from method_runs import (
    CUT,
    MICRO_BATCH,
    NUM_ROWS,
    STEPS,
    Built,
    Places,
    build,
    describe_model,
    draw_rows,
    make_config,
    make_engine,
    make_places,
    resume,
    save,
    shard_everything,
    train,
    try_to,
)
from methods import ROWS, Row, find_row
from tiny_models import MODERN, make_model
from torch import nn

from domext_ray.config.pretrain import EngineConfig, ObjectiveConfig
from domext_ray.inference.fill_mask import FillMask
from domext_ray.model import fused
from domext_ray.model.base import load_base
from domext_ray.model.build import prepare_for_device, store_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import StateBiLSTM
from domext_ray.model.domext.layers_domext import apply_rotary_pos_emb, compute_cos_sin
from domext_ray.model.joined import join_products, list_joined, refresh
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.mixed_adapters import serve_adapters
from domext_ray.models.source import open_model
from domext_ray.models.task_model import TaskModel
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.serving.engine import Engine as ServingEngine
from domext_ray.serving.engine import ServedRow
from domext_ray.serving.served_model import ServedBank
from domext_ray.text.corpus.views import make_masker
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training import capture, engine
from domext_ray.training.cost import make_full_batch
from domext_ray.training.engine import compile_layers, join_alone
from domext_ray.training.evaluate import evaluate
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, to_batch
from domext_ray.training.passages import EvalSet
from domext_ray.training.step import move_batch

pytestmark = pytest.mark.timeout(1200)
CPU = torch.device("cpu")
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
"""Of losses in fp32, a share of them."""
BF16_TOLERANCE = 2e-2
SCORE_TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}
"""Of logits and vectors, which a card may compute in bf16."""
COLLECTIVES = "all_reduce broadcast all_gather all_gather_into_tensor reduce_scatter_tensor reduce".split()


@pytest.fixture(
    scope="module",
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """What computes."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device(request.param)


# --- steps of the engine, in processes of their own: DeepSpeed keeps its first device and its first group -----------


def step_row(
    row: Row, places: Places, device: torch.device, stage: int = 0, precision: str = "fp32", **options: Any
) -> list[float]:
    """Losses of a method's first steps."""
    built = build(row, places)
    if precision == "bf16":
        store_base(built.model, torch.bfloat16)
    engine = make_engine(row, places, built, stage, precision=precision, device=device, **options)
    return [result.loss for result in train(engine, row, places, 0, CUT)]


def step_packed(places: Places, device: torch.device) -> list[float]:
    """Losses of rows that hold several texts, whose attention ends at each."""
    row, objective = find_row("AF"), ObjectiveConfig(mask_prob=0.3)
    base = load_base(str(places.base_of(row)))
    config = replace(make_config(row, places), objective=objective)
    spec = describe_model(config, base, places.tokenizer_of(row), dropout=0.0)
    masker: Any = make_masker(load_tokenizer(places.tokenizer_of(row)), objective, 3, packed=True)
    engine, losses = make_engine(row, places, Built(spec.build(), spec, {}), device=device), []
    for step in range(CUT):
        rows = masker.mask(draw_rows(row, places, step), epoch=0)
        batches = [to_batch(collated) for collated in masker.collate(rows, MICRO_BATCH)]
        share, rank = NUM_ROWS // MICRO_BATCH // dist.get_world_size(), dist.get_rank()
        counts = {LOSS: sum(batch.num_masked for batch in batches)}
        losses.append(engine.train_step(batches[rank * share :][:share], counts, step).loss)
    return losses


def step_evaluating(places: Places, device: torch.device) -> list[float]:
    """Losses at ZeRO-3 of steps between which the model is evaluated: DeepSpeed traces the order of its modules."""
    row = find_row("AF")
    engine = make_engine(row, places, build(row, places), 3, device=device)
    masker: Any = make_masker(load_tokenizer(places.tokenizer_of(row)), row.make_objective(), 3)
    rows = masker.mask(draw_rows(row, places, STEPS), epoch=0)
    held_out = EvalSet(rows, lambda own: [to_batch(collated) for collated in masker.collate(own, MICRO_BATCH)])
    losses = []
    for step in range(CUT):
        losses += [result.loss for result in train(engine, row, places, step, step + 1)]
        evaluate(engine, held_out)
    return losses


def step_again(row: Row, places: Places, device: torch.device) -> dict[str, Any]:
    """A run with dropout that goes on, and one that is saved and loaded where the first went on."""
    built = build(row, places, dropout=0.1)
    engine = make_engine(row, places, built, device=device)
    train(engine, row, places, 0, CUT)
    save(row, places, built, CUT, engine)
    dist.barrier()
    straight = [result.loss for result in train(engine, row, places, CUT, STEPS)]
    return {"straight": straight, "resumed": [result.loss for result in resume(row, places, device)[0]]}


def step_as_trial(places: Places, device: torch.device) -> dict[str, Any]:
    """Steps of a sweep's trial: what its collectives send through which backend, and its memory."""
    met, backends = set[tuple[str, str]](), dict(pair.split(":") for pair in dist.get_backend_config().split(","))

    def watch(name: str) -> None:
        plain = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            kinds = {
                argument.device.type for argument in (*arguments, *named.values()) if isinstance(argument, torch.Tensor)
            }
            met.update((kind, backends[kind]) for kind in kinds)
            return plain(*arguments, **named)

        setattr(dist, name, call)

    for name in COLLECTIVES:
        watch(name)
    losses = step_row(find_row("AF"), places, device)
    blocks = torch.cuda.memory_snapshot() if device.type == "cuda" else []
    return {"losses": losses, "met": met, "expandable": [block["is_expandable"] for block in blocks]}


def step_captured(places: Places, device: torch.device) -> dict[str, list[float]]:
    """Losses of steps that Python launches, and of steps that are captured, both with dropout."""
    record = record_operations if device == CPU else capture.record_graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "record_graph", record)
        pairs = {"launched": False, "captured": True}
        return {
            name: [result.loss for result in train_captured("af", device, capture=captures)[0]]
            for name, captures in pairs.items()
        }


FRESH = [row for row in ROWS if not row.after]
ZERO = [(name, stage) for name in ("AF", "exBERT", "AF + sentence pairs", "LoRA") for stage in (1, 2, 3)]


def list_runs() -> dict[str, tuple[str, Callable[..., Any]]]:
    """What runs, by name: the run of the CPU that it must equal, and itself."""
    af = find_row("AF")
    return {
        **{row.slug: (row.slug, partial(step_row, row)) for row in FRESH},
        **{f"{row.slug}-bf16": (row.slug, partial(step_row, row, precision="bf16")) for row in FRESH},
        "recomputed": (af.slug, partial(step_row, af, activation_checkpointing=True)),
        "offloaded": (af.slug, partial(step_row, af, stage=1, offload=True)),
        "compiled": (af.slug, partial(step_row, af, compile=True)),
        "compiled-bf16": (af.slug, partial(step_row, af, precision="bf16", compile=True)),
        "packed": ("packed", step_packed),
        # Last: ZeRO-3 leaves a product of its own in torch, whose gradients torch 2.11 compiles wrongly.
        **{
            f"{find_row(name).slug}-zero-{stage}": (find_row(name).slug, partial(step_row, find_row(name), stage=stage))
            for name, stage in ZERO
        },
        "evaluated-between-at-zero-3": (af.slug, step_evaluating),
    }


RUNS = list_runs()
REFERENCES = sorted({reference for reference, _ in RUNS.values()})


def _work(rank: int, size: int, name: str, runs: dict[str, Callable[..., Any]], places: Places, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else CPU
    os.environ |= {"LOCAL_RANK": str(rank)}
    if kind == "cuda":
        torch.cuda.set_device(device)
    if name == "trial":
        join_alone()
    else:
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = f"file://{places.root / f'store-{name}'}"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    shard_everything()
    results = {key: try_to(run, places, device) for key, run in runs.items()}
    if not rank:
        torch.save(results, places.root / f"results-{name}.pt")
    dist.destroy_process_group()


def launch(name: str, runs: dict[str, Callable[..., Any]], places: Places, kind: str, size: int = 1) -> dict[str, Any]:
    """Run in new processes, a rank on each card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", kind)  # DeepSpeed chooses at import
        if name == "trial":
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.multiprocessing.spawn(_work, (size, name, runs, places, kind), nprocs=size)
    return dict(torch.load(places.root / f"results-{name}.pt", weights_only=False))


@pytest.fixture(scope="module")
def places(tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    return make_places(tmp_path_factory.mktemp("card"), tiny_base_folder, tiny_roberta_folder)


@pytest.fixture(scope="module")
def results(places: Places, device: torch.device, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the device computes, of the runs that are asked for, on two cards where there are two."""
    own = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = {spec.params["name"] for spec in own if spec is not None and "name" in spec.params}
    runs = {name: run for name, (_, run) in RUNS.items() if name in asked | {*REFERENCES}}
    size = min(2, torch.cuda.device_count()) if device.type == "cuda" else 1
    return launch(f"device-{device.type}", runs, places, device.type, size)


@pytest.fixture(scope="module")
def references(results: dict[str, Any], places: Places, device: torch.device) -> dict[str, Any]:
    """What the CPU computes."""
    if device == CPU:
        return results
    return launch("reference", {name: RUNS[name][1] for name in REFERENCES}, places, "cpu")


def need_compiler() -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C compiler, and finds none")


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_the_cpus(
    name: str, results: dict[str, Any], references: dict[str, Any], device: torch.device
) -> None:
    if name.startswith("compiled"):
        need_compiler()
    found, expected = results[name], references[RUNS[name][0]]
    assert isinstance(found, list) and isinstance(expected, list), f"{found}\n{expected}"
    tolerance = BF16_TOLERANCE if name.endswith("-bf16") else TOLERANCE[device.type]
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert len(set(found)) == CUT, "the model trains"


@pytest.mark.parametrize("method", ["bottleneck", "AF", "exBERT"])
def test_gradients_of_many_tokens_are_compiled_rightly(method: str, places: Places, device: torch.device) -> None:
    """Of a bottleneck's shifts of LayerNorms above all: from some 16,000 tokens on torch sums them in another way."""
    need_compiler()
    built = build(find_row(method), places)
    config = replace(make_config(find_row(method), places), objective=ObjectiveConfig(mask_prob=0.15))
    batch = make_full_batch(config, cast(DomextConfig, built.model.config).base_vocab_size, 48, 700)
    prepare_for_device(built.model, device, bf16=False)
    model = cast(nn.Module, built.model).to(device).train()
    gradients = []
    for prepare in (lambda: None, partial(compile_layers, model, device)):
        prepare()
        model.zero_grad()
        MaskedLoss(model, device, bf16=False)(move_batch(batch, device))[LOSS].backward()
        gradients.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    expected, found = gradients
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= TOLERANCE[device.type] * gradient.norm() + 1e-4, name


@pytest.fixture(scope="module")
def alone(places: Places, device: torch.device) -> dict[str, Any]:
    """What a process of its own group computes, as a sweep's trial has it; its allocator grows its segments."""
    runs = {"trial": step_as_trial, **{name: partial(step_again, find_row(name)) for name in ("AF", "exBERT")}}
    runs["captured"] = step_captured
    return launch("trial", runs, places, device.type)


@pytest.mark.parametrize("method", ["AF", "exBERT"])
def test_a_resumed_run_goes_on(method: str, alone: dict[str, Any], device: torch.device) -> None:
    found = alone[method]
    assert isinstance(found, dict), found
    # A card adds the gradients of words in an order that no run has twice.
    np.testing.assert_allclose(found["resumed"], found["straight"], rtol=0.0 if device == CPU else 1e-4)


def test_captured_steps_are_those_that_python_launches(alone: dict[str, Any], device: torch.device) -> None:
    found = alone["captured"]
    assert isinstance(found, dict), found
    np.testing.assert_allclose(found["captured"], found["launched"], rtol=0.0 if device == CPU else 1e-4)


def test_a_trial_sends_nothing_of_a_card_through_gloo(alone: dict[str, Any], device: torch.device) -> None:
    assert isinstance(alone["trial"], dict), alone["trial"]
    sent = {(device.type, "gloo" if device == CPU else "nccl")}  # the model, which DeepSpeed broadcasts
    assert sent <= alone["trial"]["met"] <= sent | {("cpu", "gloo")}


def test_segments_of_memory_can_grow(alone: dict[str, Any], device: torch.device) -> None:
    if device == CPU:
        pytest.skip("a CPU has no segments")
    assert all(alone["trial"]["expandable"])


# --- fine-tuning, prediction, banks, in this process ----------------------------------------------------------------


@pytest.mark.parametrize(("family", "head_bilstm"), [("ner", 0), ("ner", 8), ("qa", 0)])
def test_a_fine_tuning_and_its_predictions_are_the_cpus(
    family: str, head_bilstm: int, places: Places, device: torch.device
) -> None:
    start = open_model(str(places.bert)).load()
    task, expected = fit(start, family, BOTTLENECK, head_bilstm=head_bilstm)
    _, found = fit(start, family, BOTTLENECK, head_bilstm=head_bilstm, device=device)
    for name, fitted in expected.items():
        apart = [(found[name].tensors[key] - value).abs().flatten() for key, value in fitted.tensors.items()]
        assert torch.cat(apart).quantile(0.99) < 1e-3  # AdamW makes whole steps of gradients that are almost zero
    scores = []
    for where in (CPU, device):  # the same model
        placed = {
            name: TaskModel.place(trained.task, trained.model, where, bf16=False) for name, trained in expected.items()
        }
        found_there = task.run({name: model.predict for name, model in placed.items()}, task.data.test)
        score = task.score(task.data.test, found_there)
        scores.append(score.get(task.metric))
    assert scores[1] == pytest.approx(scores[0], abs=0.0 if device == CPU else 0.15)  # texts on the edge, of eight


def test_a_bilstm_never_computes_in_fp16(device: torch.device) -> None:
    lstm = StateBiLSTM(DomextConfig(hidden_size=32, num_attention_heads=4, head_bilstm=8, head_layers=[1]), 0.0).to(
        device
    )
    states, mask = torch.randn(3, 7, 32, device=device, requires_grad=True), torch.ones(3, 7, device=device)
    mask[1, 4:] = 0
    seen = list[torch.dtype]()
    lstm.lstm.register_forward_hook(
        lambda module, inputs, outputs: seen.append(getattr(outputs[0], "data", outputs[0]).dtype)
    )
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for given in (mask, None):
            lstm([states], given).float().sum().backward()
    assert len(seen) == 2 and {*seen} <= {torch.bfloat16, torch.float32}


def test_a_training_in_bf16_predicts_what_one_in_fp32_does(places: Places, device: torch.device) -> None:
    start, bf16 = open_model(str(places.bert)).load(), EngineConfig(precision="bf16")
    (expected,) = fit(start, "classification", BOTTLENECK)[1].values()
    (found,) = fit(start, "classification", BOTTLENECK, engine=bf16, device=device)[1].values()
    assert found.steps == expected.steps and found.dev_scores[-1] == pytest.approx(expected.dev_scores[-1], abs=0.3)


def test_filled_masks_and_vectors_are_the_cpus(places: Places, device: torch.device) -> None:
    texts = ["the [MASK] is", "[MASK] [MASK] of a cell"]
    filled, vectors = [], []
    for where in (CPU, device):
        model, tokenizer = load_masked_lm(str(places.bert), "--model")
        fill: Any = FillMask(model.to(where), tokenizer, top_k=3, batch_tokens=512)  # type: ignore[arg-type]
        filled.append(fill.predict([fill.make_example({"text": text}, "text") for text in texts]).records)
        embed = TextEmbedding(open_model(str(places.bert)).load(), layers=(1, 2), normalize=True, device=where.type)
        vectors.append(np.asarray(embed(["the drug", "a heart disease of the patient"])))
    first, second = ([mask for record in records for mask in record["masks"]] for records in filled)
    assert len(first) == len(second) == 3
    for here, there in zip(first, second, strict=True):
        assert here["fills"][0]["token"] == there["fills"][0]["token"]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=SCORE_TOLERANCE[device.type])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "num_own"), [((4, 12, 128, 64), 1), ((3, 13, 50, 64), 3), ((1, 12, 1000, 21), 1)])
def test_a_kernel_rotates_as_the_formula(
    shape: tuple[int, ...], num_own: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, heads, tokens, size = shape
    states, gradients = (torch.randn(2, rows, tokens, heads, size).to(dtype).transpose(2, 3) for _ in range(2))
    cos_sin, outcomes = compute_cos_sin(torch.randint(0, 500, (num_own, tokens)), size, 10_000.0), []
    for where, rotate in ((CPU, apply_rotary_pos_emb), (device, fused.rotate)):
        pair = [tensor.to(where).requires_grad_() for tensor in states]
        rotated = rotate(pair[0], pair[1], cos_sin.to(where))
        torch.autograd.backward(rotated, [gradient.to(where) for gradient in gradients])
        outcomes.append(
            [tensor.detach().cpu() for tensor in (*rotated, *(leaf.grad for leaf in pair)) if tensor is not None]
        )
    for expected, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("layout", [{}, MODERN])
def test_kernels_of_our_own_train_as_the_formulas(layout: dict[str, Any], bf16: bool, device: torch.device) -> None:
    plain = make_model(**layout, module_hidden_size=12, module_ffn_size=8)  # heads of 8 numbers, and of 3
    ids, losses = torch.randint(1, 90, (4, 12), generator=torch.Generator().manual_seed(0)), []
    for where, is_fused in ((CPU, False), (device, True)):
        model = copy.deepcopy(plain).to(where).train()
        said, optimizer = fused.fuse(model, where, is_asked=is_fused), torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_fused and device != CPU and not said.startswith("on"):
            pytest.skip(said)
        join_products(model, torch.bfloat16 if bf16 else torch.float32)
        for _ in range(CUT):
            with torch.autocast(where.type, torch.bfloat16, enabled=bf16):
                scores = model(input_ids=ids.to(where)).logits
            loss = model.cls.predictions.compute_losses(scores.flatten(0, 1), ids.to(where).flatten()).mean()
            loss.backward()
            optimizer.step()
            refresh(list_joined(model))
            optimizer.zero_grad()
            losses.append(loss.item())
    tolerance = BF16_TOLERANCE if bf16 else TOLERANCE[device.type]
    np.testing.assert_allclose(losses[CUT:], losses[:CUT], rtol=tolerance)


def test_batches_that_wait_for_a_busy_card_arrive_as_they_are(device: torch.device) -> None:
    batches = [{"ids": torch.full((64, 512), i), "weights": torch.full((7,), i / 2)} for i in range(50)]
    if device != CPU:
        torch.cuda._sleep(10**9)
    sent = [move_batch(waiting, device) for waiting in batches]
    for batch, found in zip(batches, sent, strict=True):
        assert torch.equal(found["ids"].cpu(), batch["ids"]) and torch.equal(found["weights"].cpu(), batch["weights"])


def test_a_banks_mixed_pass_is_the_cpus(places: Places, device: torch.device, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", str(places.bert))
    ids, mask = torch.randint(5, 200, (4, 9), generator=torch.Generator().manual_seed(0)), torch.ones(4, 9).long()
    mask[2, 5:] = 0
    outputs: list[Any] = []
    for where in (CPU, device):
        server = serve_adapters(bank).to(where)
        batch = move_batch({"input_ids": ids, "attention_mask": mask}, where)
        with torch.no_grad():
            outputs.append(
                [server(**batch, adapter_names=names) for names in (["tags1", "sorts2", "fills1", "__base__"], "auto")]
            )
    for here, there in zip(*outputs, strict=True):
        for expected, found in zip(here, there, strict=True):
            torch.testing.assert_close(found.float().cpu(), expected, atol=SCORE_TOLERANCE[device.type], rtol=1e-3)


def test_a_servers_engine_answers_as_the_cpu(places: Places, device: torch.device, tmp_path: Path) -> None:
    bank, ids = make_bank(tmp_path / "bank", str(places.bert)), np.array([2, 7, 8, 4, 9, 3])
    rows = [
        ServedRow(name, bank.describe(name).sha256, ids[:size], None, wants, places=here, top_k=2)
        for name, size, wants, here in (
            ("tags1", 6, "labels", None),
            ("sorts2", 4, "labels", None),
            ("fills1", 6, "words", np.array([3])),
            ("tags2", 5, "mean", None),
        )
    ]
    expected, found = (ServingEngine(ServedBank(bank), where).run(rows) for where in (CPU, device))  # type: ignore[arg-type]
    for here, there in zip(expected, found, strict=True):
        assert isinstance(here, tuple) and isinstance(there, tuple), (here, there)
        np.testing.assert_allclose(there[0], here[0], atol=SCORE_TOLERANCE[device.type])
    assert np.shape(found[0][0]) == (6, len(TAGS)) and np.shape(found[1][0]) == (len(CLASSES),)  # type: ignore[index]


# --- without Ray ----------------------------------------------------------------------------------------------------

WITHOUT_RAY = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "ray", f"{name} is imported"

sys.meta_path.insert(0, Without())
"""


SMALL = "--lengths 16 --tokens 32 --repeats 2 --steps 1 --warmup 0 --threads 1".split()


def run_without_ray(code: str) -> None:
    folders = [REPOSITORY, *(REPOSITORY / name for name in ("jobs", "tests", "tests/gpu"))]
    folders += [REPOSITORY / "tests" / name for name in ("helpers", "methods")]
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *found])}
    subprocess.run([sys.executable, "-c", WITHOUT_RAY + code], env=environment, check=True)


@pytest.mark.slow
def test_these_tests_need_no_ray() -> None:
    run_without_ray("import test_gpu")


def test_the_benchmark_of_a_card_needs_no_ray(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "jobs")
    from benchmarks.output import read_records

    words = ["step", "--device", device.type, "--bases", "tiny-bert", "tiny-modernbert", "--output", str(tmp_path)]
    words += ["--methods", "full", "af", "lora", "--against", "transformers"]
    run_without_ray(f"import benchmark; sys.argv[1:] = {[*words, *SMALL]}; benchmark.main()")
    records = {(record["case"]["layout"], record["case"]["method"]): record for record in read_records(tmp_path)}
    assert len(records) == 2 * 3
    assert all(len(result["values"]) == 2 for record in records.values() for result in record["results"])


def test_what_a_card_does_is_measured_without_ray(device: torch.device, tmp_path: Path) -> None:
    blocks = ["machine", "products", "attention", "elementwise", "steps", "kernels"]  # compiling takes minutes
    words = ["card", "--device", device.type, "--quick", "--only", *blocks, "--output", str(tmp_path)]
    run_without_ray(f"import benchmark; sys.argv[1:] = {words}; benchmark.main()")
    _, *lines, end = map(json.loads, (tmp_path / "card.jsonl").read_text(encoding="utf-8").splitlines())
    assert end["num_errors"] == 0 and {line["block"] for line in lines} == {*blocks}
    if device.type == "cuda":
        assert end["num_left_out"] == 0 and all(line["peak_bytes"] > 0 for line in lines if line["block"] == "steps")
