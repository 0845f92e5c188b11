"""What a step costs: operations against closed forms, and memory, which fake tensors hold as real ones do."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_engine import build_model, join, split
from tiny_layouts import TINY_LAYOUTS
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.pretrain import (
    EngineConfig,
    ObjectiveConfig,
    PretrainConfig,
    ReplayConfig,
    ScaleConfig,
    ShapeConfig,
    TrainConfig,
    VocabConfig,
)
from domext_ray.model.base import load_base
from domext_ray.model.build import prepare_for_device, store_base
from domext_ray.model.domext.layers_domext import VARLEN
from domext_ray.model.joined import join_products
from domext_ray.model.spec import ModelSpec
from domext_ray.training.cost import (
    Roofline,
    Sharding,
    StepMemory,
    count_flops,
    count_step,
    estimate_memory,
    find_peak,
    list_moments,
    make_attention,
    make_dry_run_model,
    make_fake,
    make_full_batch,
    measure_step_memory,
    plan_memory,
    time_matmuls,
)
from domext_ray.training.engine import MAX_BUCKET_ELEMENTS
from domext_ray.training.losses import MaskedLoss, make_loss
from domext_ray.training.objective import LOSS, MaskedBatch

CPU = torch.device("cpu")
ROWS, LENGTH, VOCAB = 4, 32, 500
TOKENS, MASKED = ROWS * LENGTH, round(0.15 * ROWS * LENGTH)
D, F, L = 64, 160, 3
SHAPE = ShapeConfig(num_hidden_layers=L, hidden_size=D, num_attention_heads=4, intermediate_size=F)
PLAIN = MethodConfig(name="none", heads=0, ffn_units=0)


def count(method: MethodConfig) -> Roofline:
    """Count a step of a model without a base, of which the extensions train, or all."""
    model = ModelSpec(None, method, SHAPE, vocab_size=VOCAB).build()
    prepare_for_device(model, CPU, bf16=False)
    for name, param in model.named_parameters():
        param.requires_grad_(method.trains == "all" or ".adapters." in name)
    config = PretrainConfig(train=TrainConfig(seq_length=LENGTH))
    return count_flops(MaskedLoss(model, CPU, bf16=False), make_full_batch(config, VOCAB, LENGTH, ROWS))


def test_all_weights_cost_their_closed_form() -> None:
    """2 per multiply-add; backward twice the forward; the last layer's tokenwise part at the predicted tokens alone."""
    work = count(replace(PLAIN, trains="all"))
    attention, tokenwise = 3 * D * D + 2 * LENGTH * D, D * D + 2 * D * F
    layers = TOKENS * (L * attention + (L - 1) * tokenwise) + MASKED * tokenwise
    head = MASKED * (D * D + D * VOCAB)
    assert work.forward == 2 * (layers + head)
    assert work.backward == 2 * work.forward
    assert work.flops_per_token == 3 * work.forward / TOKENS


def test_what_is_frozen_has_no_gradient_of_its_weights() -> None:
    """Extra FFN units in the upper two layers: below them nothing is computed backwards."""
    units = 48
    work = count(replace(PLAIN, ffn_units=units, layers="1-2"))
    plain = count(replace(PLAIN, trains="all"))
    extension = (TOKENS + MASKED) * 2 * D * units
    assert work.forward == plain.forward + 2 * extension
    tokenwise, attention = D * D + 2 * D * F, 3 * D * D + 4 * LENGTH * D
    passed = MASKED * (D * D + D * VOCAB + tokenwise) + TOKENS * (attention + D * D + 2 * D * F)
    assert work.backward < 2 * (passed + 2 * extension) < plain.backward


def test_every_layout_is_counted(tmp_path: Path) -> None:
    kinds: tuple[Any, ...] = ("masked", "causal")
    for (name, layout), kind in product(TINY_LAYOUTS.items(), kinds):
        objective = ObjectiveConfig(kind=kind, whole_word=kind == "masked", next_sentence=False)
        base = load_base(str(layout.save(tmp_path / kind / name)))
        config = PretrainConfig(objective=objective, train=TrainConfig(seq_length=LENGTH))
        model = ModelSpec(base, MethodConfig(), causal=kind != "masked").build()
        prepare_for_device(model, CPU, bf16=False)
        batch = make_full_batch(config, base.config.vocab_size, LENGTH, ROWS)
        assert count_flops(MaskedLoss(model, CPU, bf16=False), batch).backward > 0, (name, kind)


PARTS = {"web": {"corpus": "web", "keep": True, "weight": {0: 0, 0.5: 1}}}


@pytest.mark.parametrize(
    ("trains", "layers", "share", "general"),
    [
        ("extensions", "", 0.01, {"replay": ReplayConfig(corpus="self", frac=0.01)}),
        ("extensions", "1", 0.25, {"replay": ReplayConfig(corpus="self", frac=0.25)}),
        ("all", "", 0.25, {"mixture": MixtureConfig(parts=PARTS)}),
    ],
    ids=["less than a row", "lower layer shared", "copy of the base, from half of the horizon on"],
)
def test_what_the_base_computes_is_counted(
    trains: Any, layers: str, share: float, general: dict[str, Any], tiny_base_folder: Path
) -> None:
    """Its forward pass over the share of general rows, but for layers that it shares with the model."""
    base, train = load_base(str(tiny_base_folder)), TrainConfig(seq_length=LENGTH)
    method = replace(PLAIN, trains=trains, ffn_units=0 if trains == "all" else 48, layers=layers)
    keeping = PretrainConfig(base="b", method=method, train=train, objective=ObjectiveConfig(keep="kl"), **general)
    plain, model = (ModelSpec(base, chosen).build() for chosen in (PLAIN, method))
    batch = make_full_batch(keeping, base.config.vocab_size, LENGTH)
    asked = count_flops(MaskedLoss(plain.requires_grad_(), CPU, bf16=False), batch).forward
    if layers:
        width, units = base.config.hidden_size, base.config.intermediate_size
        asked -= 2 * batch.input_ids.numel() * (4 * width**2 + 2 * LENGTH * width + 2 * width * units)
    objective = make_loss(keeping, base, model, (), CPU, [8])(model, CPU, bf16=False, num_chunks=1)
    alone = count_step(PretrainConfig(train=train), objective, base.config.vocab_size, LENGTH)
    found = count_step(keeping, objective, base.config.vocab_size, LENGTH)
    assert found.forward == pytest.approx(alone.forward + share * asked)
    assert found.backward == alone.backward and found.num_tokens == alone.num_tokens
    assert sum(found.matmuls.values()) > sum(alone.matmuls.values())


def test_products_are_timed_where_they_run() -> None:
    work = count(replace(PLAIN, trains="all"))
    assert sum(work.matmuls.values()) > 3 * L * 6
    for bf16 in (False, True):
        assert 0 < time_matmuls(work, CPU, bf16=bf16).matmul_seconds * TOKENS < 60


def test_attention_is_found_from_each_of_its_products() -> None:
    """A card times it as its fused kernel computes it, heads of all rows at once: two forward, four backward."""
    adapter = {1: 2 * (2 + 4), 4: 3 * 2 + 4}  # the base's heads have a gradient above the lowest extension
    for method, wanted in (
        (replace(PLAIN, trains="all"), {4: 3 * (2 + 4)}),
        (replace(PLAIN, heads=1, layers="1-2"), adapter),
    ):
        found = Counter[int]()
        for (call, inputs), number in count(method).matmuls.items():
            if call.overloadpacket is torch.ops.aten.bmm:
                gradients = make_attention(inputs, torch.float32, CPU)()
                found[len(gradients[0]) // ROWS] += number
                assert all(gradient.shape[1:] == (1, LENGTH, D // 4) for gradient in gradients)
        assert found == wanted


def test_bounds_of_rows_change_nothing_of_what_is_counted() -> None:
    batch = make_full_batch(PretrainConfig(), VOCAB, LENGTH, ROWS)
    assert isinstance(batch, MaskedBatch) and batch.cu_seq_lens is not None
    assert batch.cu_seq_lens.tolist() == [*range(0, TOKENS + 1, LENGTH)] and batch.max_length == LENGTH
    model = ModelSpec(None, MethodConfig(), SHAPE, vocab_size=VOCAB).build()
    found = []
    for attention in ("sdpa", VARLEN):  # a card's own kernel, which has no products
        model.set_attn_implementation(attention)
        found.append(count_flops(MaskedLoss(model, CPU, bf16=False), batch))
    assert found[0] == found[1]


def test_a_base_that_is_stored_in_bf16_counts_as_one_in_fp32(tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    batch = make_full_batch(PretrainConfig(train=TrainConfig(seq_length=LENGTH)), base.config.vocab_size, LENGTH, ROWS)
    found = {}
    for narrow, bf16 in product((False, True), repeat=2):
        model = ModelSpec(base, MethodConfig()).build()
        if narrow:
            store_base(model, torch.bfloat16)
        found[narrow, bf16] = count_flops(MaskedLoss(model, CPU, bf16=bf16), batch)
    assert found[True, True] == found[False, True] and found[True, False] == found[False, False]


def test_all_hidden_states_that_a_base_asks_for_are_not_kept() -> None:
    model = ModelSpec(None, PLAIN, SHAPE, vocab_size=VOCAB).build()
    model.config.output_hidden_states = True
    config = PretrainConfig(train=TrainConfig(seq_length=LENGTH))
    batch = replace(make_full_batch(config, VOCAB, LENGTH, ROWS), token_indices=torch.arange(TOKENS))
    assert MaskedLoss(model, CPU, bf16=False)(batch)[LOSS].isfinite()


def test_a_step_is_held_against_its_roofline() -> None:
    roofline = Roofline(8_000_000, 12_000_000, num_tokens=10, matmuls={}, peak=1e12)
    figures = roofline.describe(num_tokens=1000, seconds=0.02, world_size=2)
    assert figures["throughput/gigaflops_per_second"] == pytest.approx(100.0)
    assert figures["throughput/mfu"] == pytest.approx(0.05)
    counted = count(replace(PLAIN, trains="all"))
    assert [*counted.describe(1, 1.0, 1)] == ["throughput/gigaflops_per_second"], "a CPU has no published peak"


def test_a_card_is_found_by_whole_words_of_its_name() -> None:
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA GH200 480GB": 989}
    known |= {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA L4": 121, "NVIDIA L40": 181, "NVIDIA L40S": 362}
    for name, teraflops in {**known, "Tesla V100-SXM2-16GB": 0, "": 0}.items():
        assert find_peak(name) == pytest.approx(teraflops * 1e12), name


ALONE = Sharding(stage=0, world_size=1, accumulates=False)


def build_objective(method: str = "af", *, bf16: bool = False) -> MaskedLoss:
    return MaskedLoss(build_model(dropout=0.1, method=method), CPU, bf16=bf16).train()


def make_own_batch() -> Any:
    return join(split(0, 0, 1, 1)[0])


@pytest.mark.slow
def test_a_step_without_values_holds_what_a_real_one_holds() -> None:
    for method, keeps, bf16, joined in product(("af", "full"), *[(True, False)] * 3):
        objective, batch = build_objective(method, bf16=bf16), make_own_batch()
        if joined:
            join_products(objective.model, torch.bfloat16 if bf16 else torch.float32)
        real = measure_step_memory(copy.deepcopy(objective), batch, keeps_gradients=keeps)
        fake, mode = make_fake(objective)
        with mode:
            planned = measure_step_memory(fake, batch, keeps_gradients=keeps)
        # kernels make a few bytes of their own
        assert asdict(planned) == pytest.approx(asdict(real), rel=1e-3), (method, keeps, bf16, joined)
        assert real.before > real.after // 2 > 0
        assert (real.gradients > 0) <= keeps


def test_planning_leaves_the_model_as_it_is() -> None:
    objective = build_objective()
    before = copy.deepcopy(objective.state_dict())
    plan_memory(objective, make_own_batch(), ALONE, recomputes=True)
    assert all(param.grad is None and param.dtype == torch.float32 for param in objective.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.state_dict().items())
    assert not cast(Any, objective.model).is_gradient_checkpointing


def test_a_narrow_base_takes_half() -> None:
    objective = build_objective()
    plain = plan_memory(objective, make_own_batch(), ALONE)
    store_base(cast(Any, objective.model), torch.bfloat16)
    narrow = plan_memory(objective, make_own_batch(), ALONE)
    assert 0.5 <= narrow["frozen_weights"] / plain["frozen_weights"] < 0.55, "all but LayerNorms"


@pytest.mark.slow
def test_recomputed_activations_are_those_of_one_layer() -> None:
    config = PretrainConfig(
        base="none",
        vocab=VocabConfig(size=100),
        shape=ShapeConfig(num_hidden_layers=8, hidden_size=64, num_attention_heads=2, intermediate_size=128),
        method=MethodConfig(name="full", trains="all", heads=0, ffn_units=0),
        train=TrainConfig(seq_length=64, global_batch_size=32),
        engine=EngineConfig(precision="fp32"),
    )
    recomputed = replace(config, engine=replace(config.engine, activation_checkpointing=True))
    plain, one = (
        estimate_memory(make_dry_run_model(variant, ModelSpec.of(variant, None)))["activations"]
        for variant in (config, recomputed)
    )
    assert one < 0.4 * plain


def test_joined_weights_are_counted_where_they_are_stored_twice() -> None:
    """Of a base in fp32 under autocast all of them, and else the output projections and what trains, d 64."""
    outputs, trained = 2 * (64 * (64 + 16) + 64 * (128 + 1600) + 2 * 64), 2 * (64 + 1) * (3 * 16 + 1600)
    for bf16, stored, expected in (
        (False, None, 4 * (outputs + trained)),
        (True, torch.bfloat16, 2 * (outputs + trained)),
        (True, None, 2 * (outputs + trained + 2 * (64 + 1) * (3 * 64 + 128))),
    ):
        objective = build_objective(bf16=bf16)
        if stored is not None:
            store_base(objective.model, stored)
        assert "joined_weights" not in plan_memory(objective, make_own_batch(), ALONE)
        join_products(objective.model, torch.bfloat16 if bf16 else torch.float32)
        assert plan_memory(objective, make_own_batch(), ALONE)["joined_weights"] == expected


def test_zero_shares_what_it_says() -> None:
    objective = build_objective("full")
    trained = sum(4 * param.numel() for param in objective.parameters())
    for stage in range(4):
        parts = plan_memory(objective, make_own_batch(), Sharding(stage, world_size=4, accumulates=True))
        assert parts["trainable_weights"] == trained
        assert parts["optimizer_moments"] == 2 * (trained // 4 if stage else trained)
        assert parts.get("optimizer_masters", 0) == (trained // 4 if stage else 0)
        assert parts.get("shards_of_weights", 0) == (trained // 4 if stage == 3 else 0)
        assert parts["gradients"] >= (trained if stage < 2 else trained // 4)
        offloaded = plan_memory(objective, make_own_batch(), Sharding(stage, 4, accumulates=True, offload=True))
        assert not offloaded.keys() & {"optimizer_masters", "optimizer_moments"}


def test_a_large_model_is_reduced_bucket_by_bucket() -> None:
    bucket = 4 * MAX_BUCKET_ELEMENTS
    step = StepMemory(before=10, after=5, gradients=3, reducing=4)
    moments = list(list_moments(10 * bucket, 0, step, Sharding(2, 10, accumulates=False)))
    assert {"gradients": bucket, "buffers": 2 * bucket, "activations": 4} in moments
    assert max(moment["buffers"] for moment in moments) == 2 * bucket


def test_a_dry_run_plans_the_longest_rows_and_a_gpu_without_one(tiny_base_folder: Path) -> None:
    config = PretrainConfig(
        base=str(tiny_base_folder),
        method=MethodConfig(heads=1, ffn_units=16),
        train=TrainConfig(seq_length=16, long_seq_length=64, global_batch_size=8, long_micro_batch_size=4),
        engine=EngineConfig(precision="fp32"),
    )
    base = load_base(config.base)

    def plan(config: PretrainConfig) -> dict[str, int]:
        return estimate_memory(make_dry_run_model(config, ModelSpec.of(config, base)))

    short = plan(replace(config, train=replace(config.train, long_seq_length=0)))
    assert plan(config)["activations"] > 1.5 * short["activations"]
    on_gpu = plan(replace(config, scale=ScaleConfig(use_gpu=True)))
    assert on_gpu["activations"] < plan(config)["activations"], "fused attention keeps no weights"
    plain = replace(config, train=TrainConfig(seq_length=16, global_batch_size=8))
    contrast = plan(replace(plain, objective=ObjectiveConfig(kind="infonce", group_rows=8)))
    assert contrast["activations"] > 0 and "buffers" in contrast


def test_a_copy_of_the_base_is_counted(tiny_base_folder: Path) -> None:
    config = PretrainConfig(base=str(tiny_base_folder), method=MethodConfig(trains="all", heads=0, ffn_units=0))
    config = replace(config, replay=replace(config.replay, corpus="general.txt"), train=TrainConfig(seq_length=16))
    trial = make_dry_run_model(config, ModelSpec.of(config, load_base(config.base)))
    parts = estimate_memory(trial)
    assert parts["copy_of_the_base"] == parts["trainable_weights"] // 2, "in bf16, as it computes"
    assert isinstance(trial.objective, nn.Module)
