"""The fixed evaluations: what is masked, what counts, and that nothing but the corpus decides it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.config import EngineConfig, MethodConfig, ObjectiveConfig, OptimConfig, ShapeConfig
from domext_ray.corpus.shards import SCHEMA, Manifest, ShardRecord
from domext_ray.errors import CorpusError
from domext_ray.model.graft import build_model, load_base
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import (
    GENERAL_PROBE,
    PROBE_PASSES,
    build_domain_batches,
    build_probe_batches,
    evaluate,
    read_probe,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


def write_held_out(folder: Path, tokenizer: PreTrainedTokenizerBase, shard_rows: tuple[int, ...]) -> Manifest:
    random, records = np.random.default_rng(0), []
    for i, size in enumerate(shard_rows):
        ids = [
            [tokenizer.cls_token_id, *random.integers(40, len(tokenizer), 20).tolist(), tokenizer.sep_token_id]
            for _ in range(size)
        ]
        table = pa.table({"input_ids": ids, "word_starts": [[True] * 22] * size}, schema=SCHEMA)
        with pa.OSFile(str(folder / f"{i}.arrow"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(table)
        records.append(ShardRecord(f"{i}.arrow", size, 22 * size, ""))
    return Manifest(folder, "f", 32, "t", {}, (), tuple(records), 1, {})


def test_probe_masks_every_word_once(tokenizer: PreTrainedTokenizerBase) -> None:
    sentence = "the old man and the dog walk in the garden by the river, every day."
    batches = build_probe_batches([sentence], tokenizer, batch_size=3, max_length=64)
    counted = sum(each.num_masked for each in batches)
    encoded = tokenizer(sentence)
    words = [word for word in encoded.word_ids() if word is not None]
    whole = [w for w in set(words) if words.count(w) == 1]
    punctuation = 2
    assert counted == len(whole) - punctuation
    masks = torch.zeros(len(encoded["input_ids"]), dtype=torch.int64)
    for batch in batches:
        assert batch.input_ids.shape[0] <= 3
        masks += (batch.input_ids == tokenizer.mask_token_id).sum(0)[: len(masks)]
        places = batch.masked_positions
        assert (batch.input_ids.reshape(-1)[places] == tokenizer.mask_token_id).all()
    assert masks.max() == 1
    assert sum(each.input_ids.shape[0] for each in batches) <= PROBE_PASSES


def test_the_shipped_probe_is_what_the_meter_needs() -> None:
    sentences = read_probe()
    assert len(sentences) >= 300 and len(set(sentences)) == len(sentences)
    assert GENERAL_PROBE.is_file()


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe broken"])
def test_an_unusable_probe_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "probe.txt").write_bytes(content)
    with pytest.raises(CorpusError, match="--train.general_probe"):
        read_probe(tmp_path / "probe.txt")


def test_domain_batches_depend_on_the_corpus_only(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = write_held_out(tmp_path, tokenizer, (30, 3, 41))
    whole = build_domain_batches(manifest, tokenizer, ObjectiveConfig(), num_rows=50, batch_size=50)[0]
    parts = build_domain_batches(manifest, tokenizer, ObjectiveConfig(), num_rows=50, batch_size=8)
    assert torch.equal(torch.cat([each.input_ids for each in parts]), whole.input_ids)
    assert torch.equal(torch.cat([each.labels for each in parts]), whole.labels)
    assert whole.num_masked / (50 * 20) == pytest.approx(0.15, abs=0.04)
    assert (
        len(build_domain_batches(manifest, tokenizer, ObjectiveConfig(), num_rows=500, batch_size=500)[0].input_ids)
        == 74
    )


def test_scores_are_the_models(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, tiny_base_folder: Path) -> None:
    manifest = write_held_out(tmp_path, tokenizer, (25,))
    batches = build_domain_batches(manifest, tokenizer, ObjectiveConfig(), num_rows=25, batch_size=4)
    base = load_base(str(tiny_base_folder))
    model = build_model(
        base, ShapeConfig(), MethodConfig(heads=1, ffn_units=8), vocab_size=len(tokenizer), dropout=0.1, seed=0
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        engine = Engine(
            model,
            engine=EngineConfig(precision="fp32"),
            optim=OptimConfig(decay_steps=10),
            warmup_steps=1,
            micro_batch_size=4,
            accumulation_steps=1,
            seed=0,
            device=torch.device("cpu"),
        )
        scores = evaluate(engine, batches)
    finally:
        dist.destroy_process_group()
    loss, correct, count = 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits.flatten(0, 1)
            chosen = logits[batch.masked_positions]
            loss += nn.functional.cross_entropy(chosen, batch.labels, reduction="sum").item()
            correct += int((chosen.argmax(-1) == batch.labels).sum())
            count += len(batch.labels)
    assert scores.num_tokens == count
    assert scores.loss == pytest.approx(loss / count, abs=1e-5)
    assert scores.accuracy == pytest.approx(correct / count)
