"""Continued pre-training as users of transformers do it: Trainer, all weights, rows as in its example run_mlm.

`end_to_end.py` starts it as a process of its own. Enters: `Settings` as JSON on the command line. Leaves: the file that
they name, with the bits per character of held-out text over training, and when they were reached. The text is
tokenised, concatenated and cut into full rows; transformers' own collator masks whole words. Of this project it imports
only what scores the model, and neither that nor the scoring is on the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
"""What the configurations of bases call dropout."""
SEED = 0


@dataclass(frozen=True)
class Settings:
    """A run of the rival.

    Args:
        base: folder of the base.
        text: file of the documents that train, one per line.
        held_out: folder of the prepared corpus whose held-out text is scored.
        folder: an empty folder for the run's own files.
        output: file to write.
        started: when the process was started, as `time.time()` has it.
        rate: peak learning rate.
        steps: steps of the run.
        warmup_steps: those of them until the peak.
        weight_decay: AdamW's, as Trainer applies it.
        eval_every: steps between evaluations.
        eval_rows: held-out passages that are scored.
        rows: rows of a step.
        length: tokens of a row.
        dropout: of hidden states and attention weights.
        bf16: autocast.
        threads: CPU threads, and processes that tokenise.
        use_cpu: leave a GPU alone.
    """

    base: str
    text: str
    held_out: str
    folder: str
    output: str
    started: float
    rate: float
    steps: int
    warmup_steps: int
    weight_decay: float
    eval_every: int
    eval_rows: int
    rows: int
    length: int
    dropout: float
    bf16: bool
    threads: int
    use_cpu: bool


@dataclass(frozen=True)
class Point:
    """An evaluation.

    Args:
        step: steps made before it.
        seconds: since the process was started, evaluations left out.
        bits_per_character: of held-out text.
    """

    step: int
    seconds: float
    bits_per_character: float


class Clock:
    """Seconds since a process was started, pauses left out.

    Args:
        started: as `time.time()` has it.
    """

    def __init__(self, started: float) -> None:
        self.started, self.paused = started, 0.0

    def read(self) -> float:
        """Return them."""
        return time.time() - self.started - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count what happens within."""
        began = time.time()
        try:
            yield
        finally:
            self.paused += time.time() - began


def read_rows(settings: Settings, tokenizer: Any) -> Dataset:
    """Tokenise the text, concatenate it and cut it into full rows, as run_mlm does; with what its collator asks for."""
    length = settings.length

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenizer(batch["text"], return_special_tokens_mask=True, return_offsets_mapping=True))

    def group(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        joined = {name: list(chain(*each)) for name, each in batch.items()}
        end = len(joined["input_ids"]) // length * length
        return {name: [each[i : i + length] for i in range(0, end, length)] for name, each in joined.items()}

    files, cache = {"train": settings.text}, str(Path(settings.folder, "cache"))
    text = load_dataset("text", data_files=files, split="train", cache_dir=cache)
    assert isinstance(text, Dataset)
    processes = settings.threads if settings.threads > 1 else None
    tokens = text.map(tokenize, batched=True, num_proc=processes, remove_columns=["text"])
    return tokens.map(group, batched=True, num_proc=processes)


class Curve(TrainerCallback):
    """Scores the model at the start, every few steps and at the end, off the clock.

    Args:
        settings: the run.
        model: what trains.
        clock: the run's.
    """

    def __init__(self, settings: Settings, model: nn.Module, clock: Clock) -> None:
        self.settings, self.model, self.clock = settings, model, clock
        self.points: list[Point] = []
        with clock.pause():
            from domext_ray.corpus.manifest import read_manifest
            from domext_ray.training.passages import build_character_set, read_passages
            from domext_ray.vocabulary.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(Path(settings.base))
            manifest = read_manifest(Path(settings.held_out))
            passages = read_passages(manifest, tokenizer, num_passages=settings.eval_rows, max_length=settings.length)
            self.characters = build_character_set(passages, tokenizer, batch_size=16)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Score the base."""
        self._add(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Score the model where it is due."""
        if state.global_step % self.settings.eval_every == 0 or state.global_step == self.settings.steps:
            self._add(state.global_step)

    def _add(self, step: int) -> None:
        seconds = self.clock.read()
        with self.clock.pause():
            from domext_ray.training.evaluate import measure_bits

            self.model.eval()
            self.points.append(Point(step, seconds, measure_bits(self._score, self.characters)))
            self.model.train()

    def _score(self, asked: Any) -> Any:
        from domext_ray.training.evaluate import Scores

        loss, number, device = 0.0, 0, next(self.model.parameters()).device
        for batch in asked.batches:
            mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
            with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.settings.bf16):
                logits = self.model(input_ids=batch.input_ids.to(device), attention_mask=mask).logits
            own = logits.flatten(0, 1)[batch.masked_positions.to(device)].float()
            loss += float(nn.functional.cross_entropy(own, batch.labels.to(device), reduction="sum"))
            number += batch.num_masked
        return Scores(loss, num_tokens=number)


def run(settings: Settings) -> dict[str, Any]:
    """Make the run; return its curve and what it took."""
    clock = Clock(settings.started)
    torch.set_num_threads(settings.threads)
    logging.set_verbosity_error()
    disable_progress_bars()
    set_seed(SEED)
    config = AutoConfig.from_pretrained(settings.base)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, settings.dropout)
    model = AutoModelForMaskedLM.from_pretrained(settings.base, config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings.base)
    before_text = clock.read()
    rows = read_rows(settings, tokenizer)
    text_seconds = clock.read() - before_text
    curve = Curve(settings, model, clock)
    arguments = TrainingArguments(
        output_dir=settings.folder,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.rows,
        learning_rate=settings.rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        bf16=settings.bf16,
        use_cpu=settings.use_cpu,
        seed=SEED,
        remove_unused_columns=False,  # the collator reads where words are
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not settings.use_cpu,
    )
    collator = DataCollatorForLanguageModeling(  # whole words: only [MASK], it knows no other way
        tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=[curve])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    first, last = curve.points[0], curve.points[-1]
    assert last.step == settings.steps
    return {
        "curve": [asdict(each) for each in curve.points],
        "start_seconds": first.seconds,
        "text_seconds": text_seconds,
        "tokens": settings.steps * settings.rows * settings.length,
        "epochs": settings.steps * settings.rows / len(rows),
    }


if __name__ == "__main__":
    made = Settings(**json.loads(sys.argv[1]))
    Path(made.output).write_text(json.dumps(run(made)), encoding="utf-8")
