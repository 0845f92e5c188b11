"""Small real runs of a method without Ray: what the matrix measures in processes of its own (test_methods.py asserts).

DeepSpeed keeps the first process group that it sees, so engines live in processes that are started for them; one launch
runs all methods. What a worker of a job does is done here with the same functions:
model, earlier run, base stored in bf16, checkpoints.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from lone_engine import gather_whole
from methods import ROWS, Row, find_row
from torch import Tensor, nn

from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import (
    EngineConfig,
    OptimConfig,
    PretrainConfig,
    ReplayConfig,
    TrainConfig,
    VocabConfig,
    resolve_micro_batch_sizes,
)
from domext_ray.model.base import Base, hash_tensors, load_base
from domext_ray.model.build import (
    describe_extensions,
    detach,
    name_unwrapped,
    prepare_for_device,
    store_base,
)
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.storage import Place
from domext_ray.text.corpus.batching import MaskedRows, Masker, join_rows
from domext_ray.text.vocabulary.learn import import_words
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training import engine as engine_module
from domext_ray.training.checkpoint import (
    Checkpoint,
    find_latest,
    save_checkpoint,
)
from domext_ray.training.engine import Engine, TrainState
from domext_ray.training.losses import make_loss
from domext_ray.training.objective import KEEP_LOSS, LOSS, NEXT_SENTENCE_LOSS, MaskedBatch, to_batch
from domext_ray.training.start import (
    apply_start,
    check_vocabulary,
    find_start,
    pick_fixed,
)
from domext_ray.training.step import StepFigures

CPU = torch.device("cpu")
NUM_ROWS, MICRO_BATCH, STEPS, CUT, SHARD_STEPS = 8, 4, 6, 3, 2
# The gradient of a key's bias is zero but for rounding; AdamW's usual eps would blow that up to whole steps of noise.
OPTIM = OptimConfig(lr=5e-3, warmup_steps=2, decay_steps=8, max_grad_norm=0.7, weight_decay=0.1, eps=1e-6)
KNOWN_WORDS = (
    "the of and to in a that was with she would their has when river small morning bread market teacher garden winter "
    "wind patient doctor disease cell protein blood heart gene drug dose treatment model data table value"
).split()
NEW_WORDS = ["gluconate", "bronchitis", "stent", "##itis", "##emia"]


@dataclass(frozen=True)
class Places:
    """Folders that all processes see.

    Args:
        root: of the runs.
        bert: a tiny BERT.
        roberta: a tiny RoBERTa.
        rows: that are run, each below the one that it goes on from.
    """

    root: Path
    bert: Path
    roberta: Path
    rows: Sequence[Row] = tuple(ROWS)

    @property
    def words_file(self) -> Path:
        """The new words, one per line."""
        return self.root / "words.txt"

    def base_of(self, row: Row) -> Path:
        """Folder of a row's base."""
        return self.roberta if row.roberta else self.bert

    def run_of(self, row: Row) -> Path:
        """Run directory of a row."""
        return self.root / "runs" / row.slug

    def tokenizer_of(self, row: Row) -> Path:
        """Tokenizer of a row's run."""
        return self.run_of(row) / "tokenizer"


def make_places(root: Path, bert: Path, roberta: Path, names: Iterable[str] = ()) -> Places:
    """Make the run directories of some rows and those that they go on from, or of all: configuration and tokenizer."""
    asked = {*names} or {row.name for row in ROWS}
    asked |= {row.after for row in ROWS if row.name in asked}
    places = Places(root, bert, roberta, tuple(row for row in ROWS if row.name in asked))
    places.words_file.write_text("\n".join(NEW_WORDS) + "\n", encoding="utf-8")
    base, vocab = load_base(str(bert)), VocabConfig(words=str(places.words_file))
    united = import_words(vocab, base.vocabulary, root / "words")
    for row in places.rows:
        places.run_of(row).mkdir(parents=True)
        source = united.folder if row.new_words else places.base_of(row)
        shutil.copytree(source, places.tokenizer_of(row), ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (places.run_of(row) / "config.yaml").write_text(dump_yaml(make_config(row, places)), encoding="utf-8")
    return places


def make_config(row: Row, places: Places) -> PretrainConfig:
    """Return the configuration of a row's run; its checks are part of the test."""
    return PretrainConfig(
        base=str(places.base_of(row)),
        seed=5,
        init_from=str(places.run_of(find_row(row.after))) if row.after else "",
        vocab=VocabConfig(words=str(places.words_file) if row.new_words else ""),
        method=row.make_method(),
        objective=row.make_objective(),
        replay=ReplayConfig(corpus="general.txt" if row.keep else ""),
        train=TrainConfig(global_batch_size=NUM_ROWS, seq_length=48),
        optim=OPTIM,
    )


@dataclass(frozen=True)
class Built:
    """A row's model before its first step, and what of an earlier run stays in it."""

    model: DomextForMaskedLM
    spec: ModelSpec
    fixed: dict[str, Tensor]

    @property
    def base(self) -> Base:
        assert self.spec.base is not None, "every row has one"
        return self.spec.base


def build(row: Row, places: Places, *, dropout: float = 0.0, checkpoint: Checkpoint | None = None) -> Built:
    """Build a row's model as a worker of a job does: fresh, after an earlier run, or from the row's own checkpoint."""
    config = make_config(row, places)
    base = load_base(config.base, next_sentence=row.pairs)
    start = find_start(config, base, Place(places.root / "none"), {}) if row.after and checkpoint is None else None
    before = checkpoint or (start.checkpoint if start else None)
    spec = describe_model(config, base, places.tokenizer_of(row), dropout, before)
    model = spec.build()
    if checkpoint is not None:
        model.load_state_dict(checkpoint.fixed, strict=False)
        return Built(model, spec, checkpoint.fixed)
    if start is None:
        return Built(model, spec, {})
    check_vocabulary(start, places.tokenizer_of(row))
    apply_start(model, start.checkpoint, start.run_dir)
    return Built(model, spec, pick_fixed(model, start.checkpoint.changed))


def describe_model(
    config: PretrainConfig, base: Base, tokenizer: Path, dropout: float, before: Checkpoint | None = None
) -> ModelSpec:
    """Return the model of a run whose tokenizer is in a folder; `before`: the checkpoint that it goes on from."""
    spec = ModelSpec.of(config, base, before.extensions if before else None)
    return replace(spec.with_tokenizer(tokenizer), dropout=dropout, attention_dropout=None)


def make_engine(
    row: Row,
    places: Places,
    built: Built,
    stage: int = 0,
    state: TrainState | None = None,
    precision: str = "fp32",
    device: torch.device = CPU,
    **options: Any,
) -> Engine:
    """Hand a row's model to the engine, as one of the group's workers."""
    prepare_for_device(built.model, device, bf16=precision == "bf16")
    model, config = cast(nn.Module, built.model).to(device), make_config(row, places)
    return Engine(
        model,
        objective=make_loss(config, built.base, model, built.fixed, device, resolve_micro_batch_sizes(config)),
        engine=EngineConfig(zero_stage=stage, precision=precision, **options),  # type: ignore[arg-type]
        optim=OPTIM,
        warmup_steps=OPTIM.warmup_steps,
        micro_batch_size=MICRO_BATCH,
        accumulation_steps=NUM_ROWS // MICRO_BATCH // dist.get_world_size(),
        seed=7,
        device=device,
        state=state,
    )


_load_tokenizer = cache(load_tokenizer)


def draw_rows(row: Row, places: Places, step: int) -> pa.Table:
    """Return the rows of a step's global batch: words at random, of different lengths, new ones among them."""
    tokenizer = _load_tokenizer(places.tokenizer_of(row))
    random = np.random.default_rng(step)
    with_new = [*KNOWN_WORDS, *(NEW_WORDS[:3] * 8 if row.new_words else ())]
    pieces = {word: tokenizer.encode(f" {word}", add_special_tokens=False) for word in with_new}
    columns: dict[str, list[Any]] = {"input_ids": [], "word_starts": [], "second_start": []}
    for is_kept in find_kept(row):
        words = KNOWN_WORDS if is_kept else with_new  # a base that is asked knows no new words
        ids, starts = [tokenizer.cls_token_id], [True]
        for text in range(2):
            columns["second_start"] += [len(ids)] * text
            for word in random.choice(words, random.integers(5, 12)):
                ids += pieces[word]
                starts += [True] + [False] * (len(pieces[word]) - 1)
            ids, starts = [*ids, tokenizer.sep_token_id], [*starts, True]
        columns["input_ids"].append(ids)
        columns["word_starts"].append(starts)
    columns["row_id"] = [NUM_ROWS * step + i for i in range(NUM_ROWS)]
    columns["next_sentence"] = random.integers(0, 2, NUM_ROWS).tolist()
    if not row.pairs:
        del columns["second_start"], columns["next_sentence"]
    return pa.table(columns)


def find_kept(row: Row) -> np.ndarray:
    """Bool [rows of a global batch]: those that are general text; the last worker and micro batch have none."""
    return np.isin(np.arange(NUM_ROWS), [1, 2] if row.keep else [])


def draw_batches(
    row: Row, places: Places, step: int, rank: int = 0, world_size: int = 1
) -> tuple[list[MaskedBatch], int, int]:
    """Return a rank's micro batches of a step, and the global batch's masked tokens, of the domain and kept ones."""
    objective, table, kept = replace(row.make_objective(), mask_prob=0.3), draw_rows(row, places, step), find_kept(row)
    tokenizers = [_load_tokenizer(places.tokenizer_of(row)), _load_tokenizer(places.base_of(row))]
    share = slice(rank * NUM_ROWS // world_size, (rank + 1) * NUM_ROWS // world_size)
    counts, parts, found = list[int](), list[MaskedRows](), list[np.ndarray]()
    for is_kept, tokenizer in enumerate(tokenizers):
        masker = Masker(tokenizer, objective, seed=3)
        counts.append(int(masker.mask(table.take(np.flatnonzero(kept == is_kept)), epoch=0).selected.sum()))
        found.append(np.flatnonzero(kept[share] == is_kept))
        parts.append(masker.mask(table.slice(share.start, NUM_ROWS // world_size).take(found[-1]), epoch=0))
    own = join_rows(parts, found, [0, 1], [False, True]) if row.keep else parts[0]
    batches = Masker(tokenizers[0], objective, seed=3).collate(own, MICRO_BATCH)
    return [to_batch(batch) for batch in batches], counts[0], counts[1]


def train(engine: Engine, row: Row, places: Places, first: int, last: int) -> list[StepFigures]:
    """Make the steps from `first` to below `last`."""
    figures = []
    for step in range(first, last):
        batches, num_masked, num_kept = draw_batches(row, places, step, dist.get_rank(), dist.get_world_size())
        counts = {LOSS: num_masked, NEXT_SENTENCE_LOSS: NUM_ROWS if row.pairs else 0, KEEP_LOSS: num_kept}
        figures.append(engine.train_step(batches, counts, step))
    return figures


# --- what one worker measures ---------------------------------------------------------------------------------------


def measure_alone(row: Row, places: Places) -> dict[str, Any]:
    """Train straight and with a cut, then without dropout in fp32 and in bf16; the run keeps its last checkpoint."""
    built = build(row, places, dropout=0.1)
    before = {name: param.detach().clone() for name, param in built.model.named_parameters()}
    engine = make_engine(row, places, built)
    figures = train(engine, row, places, 0, CUT)
    save(row, places, built, CUT, engine)
    figures += train(engine, row, places, CUT, STEPS)
    straight = figures[CUT:], engine.gather_state()
    after = {name: param.detach() for name, param in built.model.named_parameters()}
    tensors = detach(built.model, {name: name for name in built.base.original_names})
    results = {
        "straight": straight,
        "changed": {name_unwrapped(name) for name in before if not torch.equal(before[name], after[name])},
        "names": {name_unwrapped(name) for name in before},
        "sha256": hash_tensors(tensors),
        "gradients": measure_gradients(row, places, built.model),
    }
    return results | {"resumed": resume(row, places), **measure_precisions(row, places)}


def save(row: Row, places: Places, built: Built, step: int, engine: Engine) -> None:
    """Save a checkpoint as a worker of a job does."""
    record = {
        "base": str(built.base.folder),
        "base_sha256": built.base.sha256,
        "extensions": asdict(describe_extensions(built.model.config)),
    }
    save_checkpoint(
        Place(places.run_of(row) / "checkpoints"), step, engine.gather_state(), built.fixed, {}, record, keep=1
    )


def resume(row: Row, places: Places, device: torch.device = CPU) -> tuple[list[StepFigures], TrainState]:
    """Go on from the checkpoint on the disk, and save the last one."""
    checkpoint = find_latest(Place(places.run_of(row) / "checkpoints"))
    assert checkpoint is not None and checkpoint.step == CUT
    built = build(row, places, dropout=0.1, checkpoint=checkpoint)
    engine = make_engine(row, places, built, state=checkpoint.state, device=device)
    figures = train(engine, row, places, CUT, STEPS)
    save(row, places, built, STEPS, engine)
    return figures, engine.gather_state()


def measure_gradients(row: Row, places: Places, model: DomextForMaskedLM) -> dict[str, float | None]:
    """Return the largest element of every parameter's gradient; None without one."""
    model.eval().zero_grad(set_to_none=True)
    for batch in draw_batches(row, places, STEPS)[0]:
        compute_loss(model, batch).backward()
    grads = {name_unwrapped(name): param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else grad.abs().max().item() for name, grad in grads.items()}


def compute_loss(model: DomextForMaskedLM, batch: MaskedBatch) -> Tensor:
    """Sum of the cross entropies, without the engine."""
    inputs = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    outputs = model(**inputs, masked_positions=batch.masked_positions)
    losses = torch.nn.functional.cross_entropy(outputs[0], batch.labels, reduction="none")
    loss = (losses * batch.weights).sum()
    if batch.next_sentence_labels is None:
        return loss
    return loss + torch.nn.functional.cross_entropy(outputs.seq_relationship_logits, batch.next_sentence_labels)


def measure_precisions(row: Row, places: Places) -> dict[str, Any]:
    """Steps without dropout: in fp32, the reference for several workers, and in bf16 over a base stored in bf16."""
    engine = make_engine(row, places, build(row, places))
    reference = train(engine, row, places, 0, SHARD_STEPS), engine.gather_state()
    built = build(row, places)
    model = built.model
    store_base(model, torch.bfloat16)
    frozen = {name: param.clone() for name, param in model.named_parameters() if not param.requires_grad}
    engine = make_engine(row, places, built, precision="bf16")
    figures = train(engine, row, places, 0, SHARD_STEPS)
    params = dict(model.named_parameters())
    return {
        "reference": reference,
        "bf16": figures,
        "bf16_frozen": {name: str(tensor.dtype) for name, tensor in frozen.items() if tensor.ndim > 1},
        "bf16_kept": all(torch.equal(params[name], tensor) for name, tensor in frozen.items()),
    }


# --- what two workers measure ---------------------------------------------------------------------------------------


def measure_sharded(row: Row, places: Places, stage: int) -> tuple[list[StepFigures], TrainState]:
    """The reference's steps on several workers."""
    built = build(row, places)
    engine = make_engine(row, places, built, stage)
    assert stage < 3 or not any(param.numel() for param in built.model.parameters()), "every tensor is sharded"
    return train(engine, row, places, 0, SHARD_STEPS), gather_whole(engine)


def shard_everything() -> None:
    """Make ZeRO-3 shard every tensor: the tiny base's are all below the size from which DeepSpeed does."""
    build_config = engine_module._build_config

    def build_strict_config(*arguments: Any) -> dict[str, Any]:
        config = build_config(*arguments)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    engine_module._build_config = build_strict_config


# --- processes ------------------------------------------------------------------------------------------------------


def try_to(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure a row; a failure is its result, as text, so that the other rows go on."""
    try:
        return measure(*arguments)
    except Exception:
        return traceback.format_exc()


def split_rows(rows: Sequence[Row], share: int, num_shares: int) -> list[Row]:
    """Share the rows out; a row stays with the one that it goes on from."""
    roots = [row.name for row in rows if not row.after]
    return [row for row in rows if roots.index(row.after or row.name) % num_shares == share]


def measure_rows(rank: int, places: Places, stages: tuple[int, ...] = ()) -> dict[str, Any]:
    """Every row at each ZeRO stage, as one of two workers; without stages, a rank's share of the rows, alone."""
    if not stages:
        return {row.slug: try_to(measure_alone, row, places) for row in split_rows(places.rows, rank, 2)}
    shard_everything()
    asked = [(row, stage) for row in places.rows for stage in stages]
    return {f"{row.slug}/{stage}": try_to(measure_sharded, row, places, stage) for row, stage in asked}
