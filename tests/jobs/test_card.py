"""jobs/benchmark.py card: what it measures, and what it says of what it does not."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

from domext_ray.errors import ConfigError, RunError
from domext_ray.text.corpus.batching import round_up

JOBS, CPU = REPOSITORY / "jobs", torch.device("cpu")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(JOBS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_card(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run `card` with tiny sizes; return the lines of its file but for the first, which says what ran."""
    made = runpy.run_path(str(JOBS / "benchmark.py"))
    options = made["parse_options"](["card", "--device", "cpu", "--quick", "--output", str(folder), *words])
    try:
        made["run"](options)
    finally:
        first, *lines = map(json.loads, (folder / "card.jsonl").read_text(encoding="utf-8").splitlines())
        assert first["block"] == "start" and torch.__version__.startswith(first["versions"]["torch"])
    return lines


def test_measurements_are_lines_with_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *lines, end = run_card(tmp_path, "--only", "elementwise", "attention")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]  # DeepSpeed may speak, too
    assert [json.loads(line) for line in told][1:] == [*lines, end]
    assert [line["block"] for line in lines] == ["attention"] * 32 + ["elementwise"] * 9, "in the order of the table"
    assert end["num_errors"] == 0 and end["num_left_out"] == 16
    for measured in lines:
        if measured["side"].startswith(("cuDNN", "varlen")):
            assert measured["left_out"].endswith("needs a card.")
            continue
        (rate,) = (name for name in measured if name.endswith("_per_second"))
        assert measured["seconds"] > 0 and measured[rate] > 0 and measured["speed_ratio"] > 0
        assert rate == ("bytes_per_second" if measured["block"] == "elementwise" else "flops_per_second")
    flops = {
        line["side"]: line["flops_per_second"] * line["seconds"]
        for line in lines
        if "seconds" in line and line.get("passes") == "both" and line["length"] == 32
    }
    assert [flops["flash, 3 + 1 heads"], flops["masked, 4 heads"]] == pytest.approx([12 * 4 * 64 * 32 * 16] * 2)


def test_a_block_that_raises_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import card

    def break_off(options: Namespace) -> Iterator[Any]:
        raise RuntimeError("no such kernel\nand much more")
        yield

    def fail(*inputs: Any) -> Any:
        raise RuntimeError("out of shared memory")

    monkeypatch.setitem(card.BLOCKS, "machine", (10, break_off))
    monkeypatch.setattr(card, "ELEMENTWISE", {"GELU": {**card.ELEMENTWISE["GELU"], "fused": fail}})
    with pytest.raises(RunError, match=r"2 measurements failed; .*card\.jsonl says in 'error'"):
        run_card(tmp_path, "--only", "machine", "elementwise")
    *_, machine, fused, gelu, end = map(json.loads, (tmp_path / "card.jsonl").open())
    assert machine == {"block": "machine", "error": "RuntimeError: no such kernel"}
    assert fused == {
        "block": "elementwise",
        "name": "GELU",
        "side": "fused",
        "error": "RuntimeError: out of shared memory",
    }
    assert gelu["seconds"] > 0 and end["num_errors"] == 2


def test_what_finds_no_time_is_named(tmp_path: Path) -> None:
    *lines, end = run_card(tmp_path, "--seconds", "0")
    assert end["num_left_out"] == len(lines) > 40 and end["num_errors"] == 0
    assert all(line["left_out"].endswith("the block's time was over; raise --seconds.") for line in lines)
    assert {line["block"] for line in lines} == set(run_blocks())
    assert any("exbert, as written" in line["left_out"] for line in lines)


def run_blocks() -> list[str]:
    from benchmarks.card import BLOCKS

    return [*BLOCKS]


def test_what_cannot_be_asked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = runpy.run_path(str(JOBS / "benchmark.py"))
    for words, says in (("--device cpu", "--device is 'cpu'; .* add --quick"), ("--seconds -1", "--seconds is -1")):
        with pytest.raises(ConfigError, match=says):
            made["run"](made["parse_options"](["card", "--output", str(tmp_path / "none"), *words.split()]))
    with pytest.raises(SystemExit) as error:
        made["parse_options"](["card", "--only", "memory"])
    assert error.value.code == 2 and "'memory' (choose from " in (said := capsys.readouterr().err) and "kernels" in said
    assert not (tmp_path / "none").exists()


def test_without_a_compiler_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import card

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    options = Namespace(device="cpu", sizes=card.TINY)
    about, sides = next(card.measure_compiled(options))
    compiled, written = card.compare_sides(CPU, sides)
    assert about == {"shapes": "fixed"} and written["seconds"] > 0
    assert compiled["side"].endswith(", compiled") and "C++ compiler" in compiled["left_out"]


def test_rows_are_those_of_a_run() -> None:
    from benchmarks import steps
    from benchmarks.timing import make_batch

    batch = make_batch(16, 32, 2000, CPU)
    rows, kept, number = steps._to_rows(batch), steps._to_rows(batch, keeps=True), len(batch.labels)
    assert rows.cu_seq_lens is not None and rows.cu_seq_lens.tolist() == [*range(0, 16 * 32 + 1, 32)]
    assert rows.max_length == 32 and rows.attention_mask is None
    assert torch.equal(rows.input_ids, batch.input_ids), "rivals see the same tokens"
    assert len(rows.labels) == len(rows.weights) == round_up(number) > number == rows.num_masked
    assert torch.equal(rows.labels[:number], batch.labels)
    assert torch.equal(rows.masked_positions[:number], batch.masked_positions)
    assert kept.kept_rows is not None and kept.kept_rows.rows.tolist() == [0, 1, 2, 3]
    assert kept.num_masked + kept.num_kept == number, "a predicted token counts once"


def test_a_kernel_is_of_one_kind() -> None:
    from benchmarks.card import name_kind

    for kernel, kind in (
        ("aten::addmm", "matrix products"),
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>",
            "matrix products",
        ),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "fused attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "fused attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused attention"),
        ("aten::_log_softmax_backward_data", "softmax and loss"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", "softmax and loss"),
        ("aten::gelu_backward", "GELU"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluBackwardCUDAKernelImpl>", "GELU"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "LayerNorm"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("aten::_to_copy", "copies and casts"),
        ("Memset (Device)", "filling zeros"),
        ("aten::_fused_adamw_", "AdamW"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "sums and scaling"),
        ("aten::embedding_dense_backward", "all else"),
    ):
        assert name_kind(kernel) == kind, kernel


@pytest.mark.slow
@pytest.mark.jobs
def test_every_block_runs(tmp_path: Path) -> None:
    *lines, end = run_card(tmp_path, "--seconds", "600")
    assert end["num_errors"] == 0 and {line["block"] for line in lines} == set(run_blocks())
    steps = {(line["layout"], line["tokens"], line["side"]) for line in lines if line["block"] == "steps"}
    assert {("bert", 64, "exbert, as written"), ("modernbert", 64, "af, as written")} <= steps
    (profiled, *_) = (line for line in lines if line["block"] == "kernels")
    assert len(profiled["kernels"]) == 40 and profiled["kernels"][0].keys() == {"name", "kind", "calls", "seconds"}
    compiled = [line for line in lines if line["block"] == "compile" and "loss_difference" in line]
    assert all(abs(line["loss_difference"]) < 1e-2 for line in compiled)
