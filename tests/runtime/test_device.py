"""What is chosen for a card, and for a CPU, as far as that shows without one: the card is a pretended one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_banks import make_bank

from domext_ray.config.inference import PredictConfig
from domext_ray.config.pretrain import (
    EngineConfig,
    OptimConfig,
    PrepareConfig,
    PretrainConfig,
    ScaleConfig,
    TrainConfig,
    resolve_micro_batch_sizes,
)
from domext_ray.inference.predictors import find_model, load_predictor
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.runtime import device
from domext_ray.runtime import ray_cluster as cluster
from domext_ray.runtime.device import has_bf16, prepare_device
from domext_ray.runtime.ray_cluster import resolve_precision
from domext_ray.serving.engine import Engine, ServedRow
from domext_ray.serving.served_model import ServedBank
from domext_ray.training.engine import _build_config, describe_choices

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
ON_CARD = ScaleConfig(use_gpu=True)


def pretend_card(patched: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    patched.delenv("RAY_ADDRESS", raising=False)
    patched.setattr(torch.cuda, "is_available", lambda: True)
    patched.setattr(torch.cuda, "device_count", lambda: 1)
    patched.setattr(torch.cuda, "get_device_capability", lambda of=None: capability)


def test_a_cards_capability_decides_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = PretrainConfig(scale=ON_CARD, engine=EngineConfig(base_dtype="bf16"))  # which asks for it
    for capability, precision in (((7, 5), "fp32"), ((8, 0), "bf16")):
        pretend_card(monkeypatch, capability)
        assert resolve_precision(PretrainConfig(scale=ON_CARD)).engine.precision == precision
        assert has_bf16(CARD) == (precision == "bf16") and not has_bf16(CPU)
        assert resolve_precision(stored).engine.precision == "bf16"


@pytest.mark.usefixtures("local_ray")
def test_a_clusters_cards_decide_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    for types, precision in ((["H100"], "bf16"), (["A100", "T4"], "fp32"), ([], "bf16")):
        monkeypatch.setattr(cluster, "list_accelerators", lambda types=types: types)
        assert resolve_precision(PretrainConfig(scale=ON_CARD)).engine.precision == precision, types


@pytest.mark.parametrize(
    ("capability", "says"), [((7, 5), "fp32 (compute capability 7.5)"), ((9, 0), "bf16 (compute capability 9.0)")]
)
def test_a_run_says_what_it_chose_for_a_card(
    capability: tuple[int, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_card(monkeypatch, capability)
    train = TrainConfig(global_batch_size=4096, seq_length=128, long_seq_length=512)
    config = resolve_precision(PretrainConfig(scale=ON_CARD, train=train, prepare=PrepareConfig(packed=True)))
    has_varlen = capability >= (8, 0)
    instead = "; varlen, which has no dropout, with --train.attention_dropout 0" if has_varlen else ""
    assert describe_choices(config, CARD, "on (asked; rotary positions)", resolve_micro_batch_sizes(config)) == [
        f"attention: sdpa (packed rows, fused{instead}, CUDA)",
        f"precision: {says}",
        "products: joined (CUDA)",
        "compile: off (not asked)",
        "fused kernels: on (asked; rotary positions)",
        "capture: off (not asked)",
        "micro batch: 256, then 64 rows (CUDA)",
    ]
    without = replace(config, train=replace(train, attention_dropout=0.0))
    picked = "varlen" if has_varlen else "sdpa"
    assert describe_choices(without, CARD, "", [32])[0] == f"attention: {picked} (packed rows, fused, CUDA)"
    other = "fp32" if says.startswith("bf16") else "bf16"
    asked = replace(
        config, engine=EngineConfig(precision=other, compile=True), train=replace(train, micro_batch_size=8)
    )
    said = describe_choices(asked, CARD, "off (not asked)", resolve_micro_batch_sizes(asked))
    assert said[1].startswith(f"precision: {other}") and f"(as asked; {says.partition('(')[2]}" in said[1]
    own = ("fused kernels: off (not asked)", "capture: off (not asked)")
    products = "products: as written (--engine.compile true)"
    assert said[2:] == [products, "compile: on (asked)", *own, "micro batch: 8, then 2 rows (asked)"]


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16"])
def test_a_run_says_what_it_chose_for_a_cpu(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}", encoding="utf-8")
    monkeypatch.setattr(device, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = resolve_precision(PretrainConfig(scale=ScaleConfig(use_gpu=False)))
    expected = {
        "fp32": ["attention: sdpa (padded rows, fused, CPU)", "precision: fp32 (this CPU has no bf16 units)"],
        "bf16": [
            "attention: eager (padded rows, bf16, for which the fused kernel is slower, CPU)",
            "precision: bf16 (this CPU has bf16 units)",
        ],
    }
    said = describe_choices(config, CPU, "off (asked; they run on GPUs)", [32])
    fused = "fused kernels: off (asked; they run on GPUs)"
    products = "products: as written (CPU)"
    rest = [products, "compile: off (not asked)", fused, "capture: off (not asked)", "micro batch: 32 rows (CPU)"]
    assert said == [*expected[config.engine.precision], *rest]
    for engine, expected_products in (
        (EngineConfig(joined=True), "joined (asked)"),
        (EngineConfig(joined=False), "as written (asked)"),
        (EngineConfig(zero_stage=3), "as written (--engine.zero_stage 3)"),
    ):
        assert f"products: {expected_products}" in describe_choices(replace(config, engine=engine), CPU, "", [32])
    captured = replace(config.engine, capture=True, fixed_shapes=True)
    packed = replace(config.prepare, packed=True), replace(config.objective, keep="none"), ScaleConfig()
    names = dict(zip(("prepare", "objective", "scale"), packed, strict=True))
    assert "capture: on (asked)" in describe_choices(replace(config, engine=captured, **names), CPU, "", [32])


def test_a_card_takes_rows_by_their_tokens() -> None:
    for rows, length, workers, on_card, size in (
        (4096, 128, 1, True, 256),
        (4096, 512, 8, True, 64),
        (32, 128, 1, True, 32),  # a worker has no more
        (600, 128, 1, True, 200),  # in passes of one size
        (4096, 128, 1, False, 32),
    ):
        train = TrainConfig(global_batch_size=rows, seq_length=length, long_seq_length=4 * length)
        config = PretrainConfig(train=train, scale=ScaleConfig(use_gpu=on_card, num_workers=workers))
        assert resolve_micro_batch_sizes(config)[0] == size
        assert resolve_micro_batch_sizes(config)[1] <= (32_768 // (4 * length) if on_card else size)


def test_a_process_of_a_card_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert prepare_device(False, 2.5, 64, uses_fp32=False) == CPU and asked == [2]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert prepare_device(True, 2.5, 64) == CARD and asked == [2, "high"]
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native"
    prepare_device(True, 2.5, 64)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native", "as the user has set it"


def test_zero_overlaps_its_communication_on_cards() -> None:
    for stage in range(4):
        for kind in ("cuda", "cpu"):
            made = _build_config(EngineConfig(zero_stage=stage), OptimConfig(), 4, 1, 100, kind)["zero_optimization"]
            assert made.get("overlap_comm") == (True if kind == "cuda" and stage in (1, 2) else None)


def test_predictions_are_made_in_bf16_where_the_card_has_it(
    tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the card: what comes out is fp32 again, and nearly what fp32 computes."""
    texts = ["the doctor read a [MASK] in the house .", "water"]
    config = PredictConfig(model=str(tiny_base_folder), input="a", output="b")
    fill_mask: Any = load_predictor(find_model(open_model(config.model), config), config, CPU)
    embed = TextEmbedding(open_model(str(tiny_base_folder)).load(), layers=(0, 2))
    served = Engine(ServedBank(make_bank(tmp_path / "bank", str(tiny_base_folder))), CPU)
    ids = np.arange(5, 12, dtype=np.int64)
    rows = [ServedRow("__base__", "", ids, None, "mean"), ServedRow("__base__", "", ids, None, "words", ids[:1] - 4, 3)]

    def compute() -> list[np.ndarray]:
        examples = [fill_mask.make_example({"text": text}, "text") for text in texts]
        fills = fill_mask.predict(examples).records[0]["masks"][0]["fills"]
        outcomes = [array for outcome in served.run(rows) for array in outcome]  # type: ignore[union-attr]
        return [np.array([fill["probability"] for fill in fills]), embed(texts), outcomes[0], outcomes[1]]

    exact = compute()
    monkeypatch.setattr(device, "has_bf16", lambda of: True)
    rounded = compute()
    for one, other in zip(exact, rounded, strict=True):
        assert one.dtype == other.dtype and not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, atol=0.15)
