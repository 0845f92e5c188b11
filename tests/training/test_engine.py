"""The engine against a bare PyTorch loop: every ZeRO stage, world size and accumulation, resume, options, bad steps.

Two models: extensions beside a frozen base, and exBERT with next-sentence prediction of which everything trains: two
losses, two tables of words. Real processes with gloo; one launch per world size runs all that is looked at. Two and
three workers at ZeRO stages 0 and 3 are of the default tier. Stages 1 and 2 and four workers are slow, and so is one
worker, whose steps the matrix of all methods has, too.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import launch
from lone_engine import gather_whole, measure_distance
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.errors import RunError
from domext_ray.model.base import HEADS
from domext_ray.model.build import store_base, trainable_names
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining
from domext_ray.storage import Place
from domext_ray.text.corpus.sampler import share_rows
from domext_ray.training.checkpoint import Checkpoint, find_latest, save_checkpoint
from domext_ray.training.engine import Engine, TensorState, TrainState, _forbid_compiled_op
from domext_ray.training.evaluate import evaluate
from domext_ray.training.objective import LOSS, NEXT_SENTENCE_LOSS, MaskedBatch, pad_batch
from domext_ray.training.optimizer import compute_learning_rate
from domext_ray.training.passages import EvalSet
from domext_ray.training.step import StepFigures, seed_step

pytestmark = pytest.mark.timeout(900)  # processes that import torch and DeepSpeed: minutes on a busy machine
CPU = torch.device("cpu")
VOCAB, LENGTH, ROWS, STEPS, START = 1700, 16, 8, 6, 3
# The gradient of a key's bias is zero but for rounding; AdamW's usual eps would blow that up to whole steps of noise.
OPTIM = OptimConfig(lr=5e-3, warmup_steps=2, decay_steps=8, max_grad_norm=0.7, weight_decay=0.1, eps=1e-6)
MOMENTS = ("exp_avg", "exp_avg_sq")
Stages = tuple[int, ...]
DEFAULT_STAGES, OTHER_STAGES = (0, 3), (0, 1, 2)
"""ZeRO stages of a launch; stage 0 is what others are compared with."""
each_stage = pytest.mark.parametrize(
    "stage", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
Parts = list[MaskedBatch]


def build_model(dropout: float = 0.0, method: str = "af") -> DomextForMaskedLM:
    """Two layers; frozen and trainable tensors above and below DeepSpeed's threshold for sharding (1e5 elements)."""
    modules = {"extension_vocab_size": VOCAB // 2, "module_hidden_size": 32, "module_ffn_size": 1600}
    extensions: dict[str, dict[str, Any]] = {
        "af": {"adapters": {"domain": {"heads": 1, "ffn_units": 1600}}, "adapter_init": "paper"},
        "exbert": {**modules, "has_pooler": True},
    }
    config = DomextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
        **extensions.get(method, {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (DomextForPreTraining if method == "exbert" else DomextForMaskedLM)(config)
    names = trainable_names(model, MethodConfig(trains="extensions" if method == "af" else "all"), HEADS)
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model


def draw_rows(step: int, *, pairs: bool = False) -> Parts:
    """One micro batch a row, the first without a masked token (one filler), the others with 1 to 4 of them."""
    generator = torch.Generator().manual_seed(1000 + step)
    segments = (torch.arange(LENGTH) >= LENGTH // 2).long()[None] if pairs else None
    rows = []
    for i in range(ROWS):
        ids = torch.randint(VOCAB, (1, LENGTH), generator=generator)
        positions = torch.randperm(LENGTH, generator=generator)[: max(1, i % 5)].sort().values
        labels = torch.randint(VOCAB // 50, (len(positions),), generator=generator)
        follows = torch.tensor([(step + i) % 3 % 2]) if pairs else None
        weights = torch.full((len(positions),), float(i > 0))
        rows.append(MaskedBatch(ids, None, segments, positions, labels, weights, next_sentence_labels=follows))
    return rows


def join(rows: Parts) -> MaskedBatch:
    def concatenate(name: str) -> Any:
        found = [getattr(row, name) for row in rows]
        return None if found[0] is None else torch.cat(found)

    names = ("input_ids", "token_type_ids", "labels", "weights", "next_sentence_labels")
    positions = torch.cat([row.masked_positions + i * LENGTH for i, row in enumerate(rows)])
    return MaskedBatch(attention_mask=None, masked_positions=positions, **{name: concatenate(name) for name in names})


def split(step: int, rank: int, world_size: int, accumulation_steps: int, *, pairs: bool = False) -> tuple[Parts, Any]:
    """This rank's micro batches of a step, and what the global batch has of each loss."""
    rows = draw_rows(step, pairs=pairs)
    size = ROWS // world_size // accumulation_steps
    parts = [join(rows[i : i + size]) for i in range(0, ROWS, size)]
    counts = {LOSS: sum(row.num_masked for row in rows), NEXT_SENTENCE_LOSS: ROWS if pairs else 0}
    return parts[rank * accumulation_steps :][:accumulation_steps], counts


# --- the reference: a bare loop, written without the engine ---------------------------------------------------------


@dataclass
class Bare:
    """What each step of the bare loop had: losses of words and of pairs, the gradient's norm, the state after it."""

    losses: list[float] = field(default_factory=list)
    pair_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: list[TrainState] = field(default_factory=list)


def train_bare(method: str = "af") -> Bare:
    torch.set_num_threads(1)
    model, found, pairs = build_model(method=method), Bare(), method == "exbert"
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices, others = ([p for p in trained.values() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    decayed, kept = {"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, kept], lr=0.0, eps=1e-6)
    for step in range(STEPS):
        batch = join(draw_rows(step, pairs=pairs))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * ((step + 1) / 2 if step < 2 else (8 - step) / 6)
        scores = model(batch.input_ids, token_type_ids=batch.token_type_ids, masked_positions=batch.masked_positions)
        kept = batch.weights > 0
        words = nn.functional.cross_entropy(scores[0][kept], batch.labels[kept])
        order = torch.zeros(())
        if pairs:
            order = nn.functional.cross_entropy(scores.seq_relationship_logits, batch.next_sentence_labels)
        optimizer.zero_grad()
        (words + order).backward()
        found.norms.append(nn.utils.clip_grad_norm_(trained.values(), 0.7).item())
        optimizer.step()
        found.losses.append(words.item())
        found.pair_losses.append(order.item())
        shares = {name: (param.detach(), *map(optimizer.state[param].get, MOMENTS)) for name, param in trained.items()}
        tensors = {name: TensorState(*(tensor.clone() for tensor in share)) for name, share in shares.items()}
        found.states.append(TrainState(tensors, step + 1))
    return found


@pytest.fixture(scope="module")
def bare() -> Bare:
    return train_bare()


# --- what runs in the workers ---------------------------------------------------------------------------------------


def build_engine(
    stage: int = 0,
    accumulation_steps: int = 1,
    state: TrainState | None = None,
    dropout: float = 0.0,
    model: nn.Module | None = None,
    optim: OptimConfig = OPTIM,
    **options: Any,
) -> Engine:
    """Products are joined where they can be, and the bare loop computes layers as they are written."""
    joined = stage < 3 and not options.get("compile", False)
    return Engine(
        build_model(dropout) if model is None else model,
        engine=EngineConfig(zero_stage=stage, **({"precision": "fp32", "joined": joined} | options)),
        optim=optim,
        warmup_steps=optim.warmup_steps,
        micro_batch_size=ROWS // dist.get_world_size() // accumulation_steps,
        accumulation_steps=accumulation_steps,
        seed=7,
        device=CPU,
        state=state,
    )


def train(engine: Engine, first: int, last: int, accumulation_steps: int = 1) -> list[StepFigures]:
    return [
        engine.train_step(*split(step, dist.get_rank(), dist.get_world_size(), accumulation_steps), step)
        for step in range(first, last)
    ]


def measure_losses(folder: Path, stages: Stages) -> dict[str, Any]:
    """Steps from scratch at every stage, with whole and with smallest micro batches."""
    results: dict[str, Any] = {}
    for stage in stages:
        for accumulation_steps in {1, min(4, ROWS // dist.get_world_size())}:
            engine = build_engine(stage, accumulation_steps)
            figures = train(engine, 0, STEPS, accumulation_steps)
            results[f"{stage}/{accumulation_steps}"] = figures, gather_whole(engine)
    return results


def measure_pairs(folder: Path, stages: Stages) -> dict[str, Any]:
    """Two losses; from step 4 on there are twice as many micro batches, as in the phase of long rows."""
    results: dict[str, Any] = {}
    place = dist.get_rank(), dist.get_world_size()
    for stage in stages:
        engine = build_engine(stage, 2, model=build_model(method="exbert"))
        parts = [split(step, *place, 2 if step < 4 else 4, pairs=True) for step in range(STEPS)]
        figures = [engine.train_step(*part, step) for step, part in enumerate(parts)]
        scores = engine.evaluate(join(draw_rows(99, pairs=True))).sum(0).tolist()
        results[str(stage)] = figures, gather_whole(engine), scores
    return results


def save(engine: Engine, folder: Path) -> Checkpoint:
    """Save a checkpoint, each rank its share, and find it."""
    save_checkpoint(Place(folder), START, engine.gather_state(), {}, {}, {}, keep=1)
    dist.barrier()
    found = find_latest(Place(folder))
    assert found is not None
    return found


def measure_saving(_: int, folder: Path, stages: Stages) -> dict[str, Any]:
    """Steps up to a checkpoint; the elements that this rank saves of it."""
    results: dict[str, Any] = {}
    for stage in stages:
        engine = build_engine(stage)
        train(engine, 0, START)
        save(engine, folder / str(stage))
        results[str(stage)] = sum(tensor.param.numel() for tensor in engine.gather_state().tensors.values())
    return results


def measure_going_on(_: int, folder: Path, stages: Stages) -> dict[str, Any]:
    """The steps after a checkpoint that other ranks saved, at the same stage."""
    results: dict[str, Any] = {}
    for stage in stages:
        saved = find_latest(Place(folder / str(stage)))
        assert saved is not None
        engine = build_engine(stage, state=saved.state)
        results[str(stage)] = gather_whole(engine), train(engine, START, STEPS), gather_whole(engine)
    return results


def join_evaluated(some: np.ndarray) -> Parts:
    rows = draw_rows(99)
    return [join([rows[i] for i in some[first : first + 2]]) for first in range(0, len(some), 2)]


def measure_resume(folder: Path, stages: Stages) -> dict[str, Any]:
    """Start at every stage from a state that the bare loop made; continue one's own, with dropout, evaluated before.

    Ranks score different amounts of a batch, the last one nothing, as a filler; of two ranks that share the rows of a
    set, one has two batches and the other one, or one row and none.
    """
    results: dict[str, Any] = {}
    for stage in stages:
        for offload in {False, stage > 0}:
            given = torch.load(folder / "state.pt", weights_only=False)
            engine = build_engine(stage, 2, state=given, offload=offload)
            loaded = gather_whole(engine)
            results[f"given/{stage}/{offload}"] = loaded, train(engine, START, STEPS, 2), gather_whole(engine)
        engine = build_engine(stage, 2, dropout=0.3)
        train(engine, 0, START, 2)
        saved, rows = save(engine, folder / f"own-{stage}"), draw_rows(99)
        batch, asked = rows[0] if dist.get_rank() else join(rows[2:6]), EvalSet(np.arange(1, 6), join_evaluated)
        scores = [engine.evaluate(batch).sum(0).tolist() for _ in range(2)]
        sets = [
            evaluate(engine, replace(asked, rows=asked_rows)).tolist() for asked_rows in (asked.rows, asked.rows[:1])
        ]
        results[f"evaluated/{stage}"] = scores, sets, gather_whole(engine)
        going_on = train(engine, START, STEPS, 2), gather_whole(engine)
        again = build_engine(stage, 2, dropout=0.3, state=saved.state)
        results[f"own/{stage}"] = going_on, (train(again, START, STEPS, 2), gather_whole(again))
        other = build_engine(0 if stage == 3 else 3, 2, dropout=0.3, state=saved.state)  # whose products are not joined
        results[f"elsewhere/{stage}"] = going_on, (train(other, START, STEPS, 2), gather_whole(other))
    return results


def measure_bad_steps(folder: Path, stages: Stages) -> dict[str, Any]:
    """An infinite loss, then a gradient with one infinite element, both on the last rank only; then good steps."""
    results: dict[str, Any] = {}
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for stage, offload in [(number, offload) for number in stages for offload in {False, number > 0}]:
        model = build_model()
        engine = build_engine(stage, 2, model=model, offload=offload)
        train(engine, 0, 2, 2)
        before = gather_whole(engine)
        parts, counts = split(2, dist.get_rank(), dist.get_world_size(), 2)
        bad_parts = [parts[0], replace(parts[1], weights=torch.full_like(parts[1].weights, math.inf))]
        bad = [engine.train_step(bad_parts if is_last else parts, counts, 2)]
        bias = next(param for name, param in model.named_parameters() if name.endswith("adapters.domain.output.bias"))
        hook = bias.register_hook(lambda grad: torch.full_like(grad, math.inf)) if is_last else None
        bad.append(engine.train_step(parts, counts, 2))
        if hook is not None:
            hook.remove()
        after = gather_whole(engine)
        results[f"{stage}/{offload}"] = bad, before, after, train(engine, 2, 4, 2)
    return results


def measure_options(folder: Path, stages: Stages) -> dict[str, Any]:
    """bf16, a base stored in bf16, recomputed activations, no clipping; the frozen tensors afterwards."""
    import deepspeed

    results: dict[str, Any] = {}
    for stage in stages:
        for name in ("bf16", "stored", "recomputed", "unclipped"):
            model, optim = build_model(), OPTIM
            if name == "stored":
                store_base(model, torch.bfloat16)
            if name == "unclipped":
                optim = replace(OPTIM, max_grad_norm=0.0)
            precision = "bf16" if name in ("bf16", "stored") else "fp32"
            engine = build_engine(
                stage, 2, model=model, optim=optim, precision=precision, activation_checkpointing=name == "recomputed"
            )
            figures = train(engine, 0, START, 2)
            frozen = [param for param in model.parameters() if not param.requires_grad]
            with deepspeed.zero.GatheredParameters(frozen, enabled=stage == 3):
                kept = [param.detach().clone() for param in frozen]
            results[f"{name}/{stage}"] = figures, gather_whole(engine), kept
    return results


MEASURED = {
    **{"losses": measure_losses, "pairs": measure_pairs, "options": measure_options},
    **{"resume": measure_resume, "bad": measure_bad_steps},
}


def measure(_: int, names: Sequence[str], folder: Path, stages: Stages) -> dict[str, Any]:
    return {name: MEASURED[name](folder, stages) for name in names}


def measure_compiled(_: int, stages: Stages) -> dict[str, Any]:
    """Compiled steps and evaluations of many sizes, the number of masked tokens changing each time."""
    from torch._dynamo.utils import counters

    results: dict[str, Any] = {"padded": _measure_padded(), "breaks": dict(counters["graph_break"])}
    for stage in stages:
        torch._dynamo.reset()
        counters.clear()
        engine = build_engine(stage, 2, compile=True)
        figures = []
        for step in range(STEPS):
            figures += train(engine, step, step + 1, 2)
            engine.evaluate(join(draw_rows(50 + step)[:4]))
            engine.evaluate(draw_rows(0)[0])
        results[str(stage)] = figures, counters["stats"]["unique_graphs"]
    return results


def _measure_padded() -> list[list[float]]:
    """Losses of an engine that runs layers as they are written, and of one that compiles them: rows of many lengths."""
    draws = np.random.default_rng(0)
    batches = []
    for num_rows, most in ((1, 9), (3, 16), (8, 17), (6, 12), (5, 17), (7, 9)):
        rows = [draws.integers(5, VOCAB, size) for size in draws.integers(4, most, num_rows)]
        batches.append(pad_batch(rows, rows, [np.arange(len(row)) % 4 == 1 for row in rows], pad_id=0))
    assert any(batch.token_indices is not None for batch in batches)
    assert any(batch.attention_mask is None for batch in batches)
    losses = []
    for compile in (False, True):
        engine = build_engine(compile=compile)
        losses.append([engine.train_step([batch], batch.counts, i).loss for i, batch in enumerate(batches)])
    return losses


def measure_uneven(_: int, stages: Stages) -> dict[str, Any]:
    """Eight rows on three workers, two a pass: the first has a pass less, and repeats one that counts nothing."""
    results: dict[str, Any] = {}
    share = share_rows(ROWS, dist.get_rank(), dist.get_world_size())
    for stage in stages:
        engine, figures = build_engine(stage, 2), list[StepFigures]()
        for step in range(STEPS):
            rows = draw_rows(step)
            parts = [join(rows[i : min(i + 2, share.stop)]) for i in range(share.start, share.stop, 2)]
            parts += [parts[-1].without_weight()] * (2 - len(parts))
            figures.append(engine.train_step(parts, {LOSS: sum(row.num_masked for row in rows)}, step))
        results[f"{stage}/2"] = figures, gather_whole(engine)
    return {"losses": results}


@pytest.fixture(scope="module")
def launch_once(bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[Any]]:
    """Gives what the ranks of a world gave, by its size and a ZeRO stage, beside which others run."""

    @functools.cache
    def launch_stages(world_size: int, stages: Stages) -> list[Any]:
        folder = tmp_path_factory.mktemp("engine")
        torch.save(bare.states[START - 1], folder / "state.pt")
        names = ("losses", "resume", "bad", *(("pairs", "options") if world_size > 1 else ()))
        ranks = launch(measure, (names, folder, stages), world_size, folder)
        for i, result in enumerate(ranks):
            result["output"] = (folder / f"output-{i}").read_text()
            result["extensions"] = (folder / f"extensions-{i}").exists()
        return ranks

    return lambda size, stage: launch_stages(size, DEFAULT_STAGES if stage in DEFAULT_STAGES else OTHER_STAGES)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest, stage: int, launch_once: Callable[[int, int], list[Any]]) -> list[Any]:
    return launch_once(request.param, stage)


@pytest.fixture
def two_ranks(stage: int, launch_once: Callable[[int, int], list[Any]]) -> list[Any]:
    return launch_once(2, stage)


# --- what is asserted -----------------------------------------------------------------------------------------------


def check_steps(ranks: list[Any], bare: Bare, stage: int, accumulation_steps: int) -> None:
    for result in ranks:
        figures, state = result["losses"][f"{stage}/{accumulation_steps}"]
        assert [step.loss for step in figures] == pytest.approx(bare.losses, abs=2e-5)
        assert [step.grad_norm for step in figures] == pytest.approx(bare.norms, rel=1e-4)
        assert [step.learning_rate for step in figures] == pytest.approx(
            [0.0025, 0.005, 0.005, 0.005 * 5 / 6, 0.005 * 4 / 6, 0.0025]
        )
        assert all(step.finite and not step.skipped for step in figures)
        assert measure_distance(state, bare.states[-1]) < 5e-5


@each_stage
def test_steps_equal_the_bare_loop(ranks: list[Any], bare: Bare, stage: int) -> None:
    for accumulation_steps in (1, 4):
        check_steps(ranks, bare, stage, accumulation_steps)


@pytest.mark.slow
def test_uneven_shares_equal_the_bare_loop(bare: Bare, tmp_path: Path) -> None:
    ranks = launch(measure_uneven, ((0, 3),), 3, tmp_path)
    for stage in (0, 3):
        check_steps(ranks, bare, stage, 2)


@pytest.mark.slow
def test_four_workers_equal_the_bare_loop(bare: Bare, tmp_path: Path) -> None:
    stages = (0, 1, 2, 3)
    ranks = launch(measure, (("losses",), tmp_path, stages), 4, tmp_path)
    for stage in stages:
        for accumulation_steps in (1, 2):
            check_steps(ranks, bare, stage, accumulation_steps)


@each_stage
def test_both_losses_of_pairs_equal_the_bare_loop(two_ranks: list[Any], stage: int) -> None:
    """Everything trains, the word embeddings that are also the output projection among it."""
    pairs = train_bare("exbert")
    for result in two_ranks:
        figures, state, scores = result["pairs"][str(stage)]
        assert [step.loss for step in figures] == pytest.approx(pairs.losses, abs=1e-4)
        assert [step.losses[NEXT_SENTENCE_LOSS] for step in figures] == pytest.approx(pairs.pair_losses, abs=1e-4)
        assert [step.grad_norm for step in figures] == pytest.approx(pairs.norms, rel=1e-4)
        assert measure_distance(state, pairs.states[-1]) < 2e-4
        assert scores[0] > 0 and 0 <= scores[3] <= scores[4] == ROWS


@each_stage
def test_state_of_another_topology_goes_on(ranks: list[Any], bare: Bare, stage: int) -> None:
    for offload in {False, stage > 0}:
        loaded, figures, state = ranks[0]["resume"][f"given/{stage}/{offload}"]
        assert measure_distance(loaded, bare.states[START - 1]) == 0.0
        assert [step.loss for step in figures] == pytest.approx(bare.losses[START:], abs=1e-5)
        assert measure_distance(state, bare.states[-1]) < 5e-5


@each_stage
def test_resume_is_exact_with_dropout(ranks: list[Any], stage: int) -> None:
    """And evaluations leave no trace: one of the two was evaluated before it went on."""
    (going_on, expected), (again, found) = ranks[0]["resume"][f"own/{stage}"]
    assert again == going_on
    assert measure_distance(found, expected) == 0.0


@each_stage
def test_another_stage_keeps_the_losses(ranks: list[Any], stage: int) -> None:
    """With dropout: products are joined at one of the two stages, and draw the masks that layers draw as written."""
    (going_on, expected), (again, found) = ranks[0]["resume"][f"elsewhere/{stage}"]
    assert [step.loss for step in again] == pytest.approx([step.loss for step in going_on], rel=1e-5)
    assert measure_distance(found, expected) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_four_ranks_saved_goes_on_with_fewer(bare: Bare, tmp_path: Path, num_ranks: int) -> None:
    stages, places = (0, 2, 3), [tmp_path / "four", tmp_path / "fewer"]
    for place in places:
        place.mkdir()
    shares = launch(measure_saving, (tmp_path, stages), 4, places[0])
    ranks = launch(measure_going_on, (tmp_path, stages), num_ranks, places[1])
    whole = sum(tensor.param.numel() for tensor in bare.states[0].tensors.values())
    for stage in map(str, stages):
        assert len([*(tmp_path / stage).glob("step-*/tensors-*-of-00004.safetensors")]) == 4
        numbers = [share[stage] for share in shares]
        assert sum(numbers) == whole and max(numbers) < 0.4 * whole, "no rank holds all"
        for result in ranks:
            loaded, figures, state = result[stage]
            assert measure_distance(loaded, bare.states[START - 1]) < 5e-5
            assert [step.loss for step in figures] == pytest.approx(bare.losses[START:], abs=2e-5)
            assert measure_distance(state, bare.states[-1]) < 5e-5


@each_stage
def test_a_bad_step_on_one_rank_changes_nothing(ranks: list[Any], bare: Bare, stage: int) -> None:
    for offload in {False, stage > 0}:
        for result in ranks:
            bad, _, _, going_on = result["bad"][f"{stage}/{offload}"]
            assert all(step.skipped and not step.finite for step in bad)
            assert [math.isfinite(step.loss) for step in bad] == [False, True]
            assert not any(math.isfinite(step.grad_norm) for step in bad)
            assert [step.loss for step in going_on] == pytest.approx(bare.losses[2:4], abs=2e-5)
        _, before, after, _ = ranks[0]["bad"][f"{stage}/{offload}"]
        assert after.num_updates == 2 and measure_distance(before, after) == 0.0


@torch.no_grad()
def score_with(state: TrainState, batch: MaskedBatch) -> tuple[float, int]:
    """The sum of the losses of a batch, and how many predictions are right, without the engine and without dropout."""
    model = build_model()
    model.load_state_dict({name: tensor.param for name, tensor in state.tensors.items()}, strict=False)
    logits = model(input_ids=batch.input_ids, masked_positions=batch.masked_positions).logits
    loss = nn.functional.cross_entropy(logits, batch.labels, reduction="sum").item()
    return loss, int((logits.argmax(-1) == batch.labels).sum())


@each_stage
def test_evaluations_are_summed_over_ranks(two_ranks: list[Any], stage: int) -> None:
    """Row by row: of ranks that score different amounts, and of sets of five rows and of one, which only rank 0 has."""
    for rank, result in enumerate(two_ranks):
        scores, sets, state = result["resume"][f"evaluated/{stage}"]
        expected = (0.0, 0) if rank else score_with(state, join(draw_rows(99)[2:6]))
        assert [score[:2] for score in scores] == [[pytest.approx(expected[0], rel=1e-4), expected[1]]] * 2
        for found, last in zip(sets, (6, 2), strict=True):
            rows = draw_rows(99)[1:last]
            expected = [[*score_with(state, row), row.num_masked] for row in rows]
            assert found == [[pytest.approx(loss, rel=1e-4), *counts] for loss, *counts in expected]


@each_stage
def test_options(two_ranks: list[Any], bare: Bare, stage: int) -> None:
    options, first = two_ranks[0]["options"], bare.losses[:START]
    losses = {name: [step.loss for step in found[0]] for name, found in options.items()}
    assert losses[f"recomputed/{stage}"] == pytest.approx(first, abs=2e-5)
    assert losses[f"bf16/{stage}"] == pytest.approx(first, abs=0.1)
    assert losses[f"bf16/{stage}"] != pytest.approx(first, abs=1e-6)
    for name in ("bf16", "stored"):  # the same behaviour at every stage
        assert losses[f"{name}/{stage}"] == pytest.approx(losses[f"{name}/0"], abs=5e-3)
        for state in options[f"{name}/{stage}"][1].tensors.values():
            assert {tensor.dtype for tensor in vars(state).values()} == {torch.float32}
    assert options[f"unclipped/{stage}"][0][0].grad_norm == pytest.approx(bare.norms[0], rel=1e-4)
    assert losses[f"unclipped/{stage}"] == pytest.approx(losses["unclipped/0"], abs=1e-4)
    assert losses[f"unclipped/{stage}"][-1] != pytest.approx(first[-1], abs=1e-4)
    named = {name: param for name, param in build_model().named_parameters() if not param.requires_grad}
    for name in ("bf16", "recomputed"):
        assert all(torch.equal(*pair) for pair in zip(options[f"{name}/{stage}"][2], named.values(), strict=True))
    rounded = [param if "LayerNorm" in name else param.bfloat16() for name, param in named.items()]
    assert all(torch.equal(*pair) for pair in zip(options[f"stored/{stage}"][2], rounded, strict=True))


@pytest.mark.slow
def test_compiled_steps_equal_the_bare_loop(bare: Bare, tmp_path: Path) -> None:
    stages = (0, 1, 2)
    (results,) = launch(measure_compiled, (stages,), 1, tmp_path)
    assert results["padded"][1] == pytest.approx(results["padded"][0], abs=1e-4) and not results["breaks"]
    for stage in stages:
        figures, num_graphs = results[str(stage)]
        assert [step.loss for step in figures] == pytest.approx(bare.losses, abs=1e-4)
        assert num_graphs == 2  # a layer, and the last one, which computes the predicted tokens alone


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_was_compiled_or_printed(ranks: list[Any]) -> None:
    for result in ranks:
        assert not result["extensions"]
        assert [line for line in result["output"].splitlines() if "OVERFLOW" not in line] == []


def test_a_frozen_base_is_stored_as_it_computes() -> None:
    narrow = {"auto": [True, False], "fp32": [False, False]}
    for base_dtype, expected in narrow.items():
        engines = [EngineConfig(base_dtype=base_dtype, precision=precision) for precision in ("bf16", "fp32")]
        assert [config.has_narrow_base for config in engines] == expected


def test_a_deepspeed_without_the_switch_is_named() -> None:
    with pytest.warns(UserWarning, match="DeepSpeed 9.9 has no switch for its compiled deepspeed_shm_comm"):
        _forbid_compiled_op(SimpleNamespace(ops=SimpleNamespace(), __version__="9.9"))


def test_learning_rate() -> None:
    linear = OptimConfig(lr=1.0, decay_steps=10, warmup_steps=4)
    rates = [compute_learning_rate(step, linear, 4) for step in range(12)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0])
    assert compute_learning_rate(0, OptimConfig(lr=1.0, decay_steps=2), 0) == 1.0
    cosine = [compute_learning_rate(step, replace(linear, schedule="cosine"), 4) for step in (3, 4, 7, 10, 11)]
    assert cosine == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    stable = replace(linear, schedule="wsd", decay_frac=0.25)
    rates = [compute_learning_rate(5, stable, 4, progress) for progress in (0.0, 0.5, 0.75, 0.875, 1.0)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
    rates = [compute_learning_rate(1, stable, 4, progress) for progress in (0.5, 0.9, 1.0)]
    assert rates == pytest.approx([0.5, 0.4, 0.0]), "a warm-up comes first; a budget that ends in it ends at 0"


def test_seeds_differ_by_seed_step_and_rank() -> None:
    draws = set()
    for arguments in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        seed_step(*arguments)
        draws.add(torch.rand(1).item())
    seed_step(0, 0, 0)
    assert len(draws) == 5 and torch.rand(1).item() in draws


def test_state_of_another_model_is_one_sentence(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    state = copy.deepcopy(bare.states[0])
    name = "bert.encoder.layer.0.adapters.domain.output.bias"
    del state.tensors[name]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(RunError, match=rf"1 differ, first {name}: None instead of \(64,\)"):
        build_engine(state=state)
