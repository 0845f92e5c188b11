"""Rivals that are processes of their own: `python -m benchmarks.rival_worker adapters|mlm SETTINGS`, which are JSON.

`adapters`: AdapterHub's library, in an environment of its own, because it pins another transformers (rivals.py). Enters
a line on standard input per request: a folder with weights and a batch, then steps. Leaves a line of JSON per answer.
Between two requests it waits for the pipe, so it takes no processor time from the other side.

`mlm`: continued pre-training as users of transformers do it: Trainer, all weights, rows as in its example run_mlm. It
leaves the file `output`, with the bits per character of held-out text over training, and when they were reached. The
text is tokenised, concatenated and cut into full rows; transformers' own collator masks whole words. Of this project it
imports only what scores the model, and neither that nor the scoring is on the clock.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from benchmarks.timing import Batch, compute_figures, make_step, time_steps
from torch import Tensor, nn

QUIET = {name: "no" for name in ("logging_strategy", "save_strategy", "eval_strategy")}
QUIET |= {"report_to": "none", "disable_tqdm": True}  # type: ignore[dict-item]
"""Of a Trainer that does nothing beside its steps."""
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
"""What the configurations of bases call dropout."""


def serve_adapters(settings: dict[str, Any]) -> None:
    """Answer requests until standard input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not look like an answer
        try:
            adapters, transformers = (importlib.import_module(name) for name in ("adapters", "transformers"))
        except ImportError as error:
            sys.exit(f"{sys.executable}: {error}")
        torch.set_num_threads(settings["threads"])
        if settings["as_worker"]:
            _use_kernels(uses_fp32=not settings["bf16"])
        hello = {"adapters": adapters.__version__, "threads": torch.get_num_threads()}
        print(json.dumps(hello), file=answers, flush=True)
        model, device = _make_adapters(adapters, transformers, settings), torch.device(settings["device"])
        folder = Path(sys.stdin.readline().strip())
        _load(model, folder / "weights")
        loaded = importlib.import_module("safetensors.torch").load_file(folder / "batch")
        batch = Batch(**{name: tensor.to(device) for name, tensor in loaded.items()})

        def compute(batch: Batch) -> Tensor:  # BertForMaskedLM's own loss: every position, labels of -100 left out
            loss: Tensor = model(input_ids=batch.input_ids, labels=batch.all_labels.view_as(batch.input_ids)).loss
            return loss

        step = time_steps(make_step(model, compute, batch, bf16=settings["bf16"]), settings["steps"], device)
        print(json.dumps(asdict(compute_figures(model, lambda: compute(batch)))), file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(asdict(step())), file=answers, flush=True)


def _make_adapters(adapters: Any, transformers: Any, settings: dict[str, Any]) -> nn.Module:
    """A BERT with bottleneck adapters, made as that library's users make it."""
    model = transformers.BertForMaskedLM(transformers.BertConfig(**settings["config"]))
    adapters.init(model)
    kind = adapters.DoubleSeqBnConfig(reduction_factor=settings["reduction_factor"], non_linearity="gelu")
    model.add_adapter(settings["adapter"], config=kind, set_active=True)
    model.train_adapter(settings["adapter"])
    # The library freezes the encoder; this method trains LayerNorms of its layers too, and no head.
    model.cls.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.attention.output.LayerNorm.requires_grad_(True)
        layer.output.LayerNorm.requires_grad_(True)
    made: nn.Module = model.to(settings["device"])
    return made


def _load(model: nn.Module, weights: Path) -> None:
    tensors = importlib.import_module("safetensors.torch").load_file(weights)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    loaded = {own[name] for name in tensors}
    left_out = [name for name in missing if own[name] not in loaded]  # the others are tied
    assert not left_out and not unexpected, f"missing {left_out}, unexpected {unexpected}"


def _use_kernels(*, uses_fp32: bool) -> None:
    from domext_ray.runtime.device import TRAINING, configure_kernels  # an older torch may not load them

    if not hasattr(torch.library, "get_kernel"):
        sys.exit(f"{sys.executable}: --as_worker needs a newer torch than {torch.__version__}")
    configure_kernels(TRAINING, uses_fp32=uses_fp32)


# --- transformers' Trainer, as in run_mlm ---


def run_mlm(settings: dict[str, Any]) -> dict[str, Any]:
    """Make the run; return its curve and what it took, in seconds since the process was started, scoring left out."""
    from transformers import (
        AutoConfig,
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )
    from transformers.utils import logging

    torch.set_num_threads(settings["threads"])
    logging.set_verbosity_error()
    set_seed(0)
    config = AutoConfig.from_pretrained(settings["base"])
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, settings["dropout"])
    model: Any = AutoModelForMaskedLM.from_pretrained(settings["base"], config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["base"])
    rows, curve = _read_rows(settings, tokenizer), list[dict[str, float]]()
    began, counted_from = time.time(), settings["started"]
    score = _make_scorer(settings, model)
    counted_from += time.time() - began

    class Curve(TrainerCallback):
        """Scores the model at the start, every few steps and at the end, off the clock."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_step_end(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal counted_from
            step, began = state.global_step, time.time()
            if step % settings["evaluate_every"] == 0 or step == settings["steps"]:
                curve.append({"step": step, "seconds": began - counted_from, "bits_per_character": score()})
                counted_from += time.time() - began

    arguments = TrainingArguments(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["rows"],
        learning_rate=settings["rate"],
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        bf16=settings["bf16"],
        use_cpu=settings["use_cpu"],
        seed=0,
        remove_unused_columns=False,  # the collator reads where words are
        dataloader_pin_memory=not settings["use_cpu"],
        **QUIET,  # type: ignore[arg-type]
    )
    collator = DataCollatorForLanguageModeling(  # whole words: only [MASK], it knows no other way
        tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=[Curve()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert curve[-1]["step"] == settings["steps"]
    read = settings["steps"] * settings["rows"]
    found = {"curve": curve, "start_seconds": curve[0]["seconds"]}
    return {**found, "tokens": read * settings["length"], "epochs": read / len(rows)}


def _read_rows(settings: dict[str, Any], tokenizer: Any) -> Any:
    """Tokenise the text, concatenate it and cut it into full rows, as run_mlm does; with what its collator asks for."""
    from datasets import disable_progress_bars, load_dataset

    length = settings["length"]

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenizer(batch["text"], return_special_tokens_mask=True, return_offsets_mapping=True))

    def group(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        joined = {name: list(chain(*rows)) for name, rows in batch.items()}
        end = len(joined["input_ids"]) // length * length
        return {name: [values[i : i + length] for i in range(0, end, length)] for name, values in joined.items()}

    disable_progress_bars()
    cache, processes = str(Path(settings["folder"], "cache")), settings["threads"] if settings["threads"] > 1 else None
    text: Any = load_dataset("text", data_files={"train": settings["text"]}, split="train", cache_dir=cache)
    tokens = text.map(tokenize, batched=True, num_proc=processes, remove_columns=["text"])
    return tokens.map(group, batched=True, num_proc=processes)


def _make_scorer(settings: dict[str, Any], model: nn.Module) -> Any:
    """Return what measures the bits per character of the prepared corpus's held-out text, as this library does."""
    from domext_ray.storage import Place
    from domext_ray.text.corpus.manifest import read_manifest
    from domext_ray.text.vocabulary.tokenizer import load_tokenizer
    from domext_ray.training.evaluate import Scores, measure_bits
    from domext_ray.training.passages import build_character_set, read_passages

    tokenizer, manifest = load_tokenizer(Path(settings["base"])), read_manifest(Place(settings["held_out"]))
    passages = read_passages(manifest, tokenizer, num_passages=settings["eval_rows"], max_length=settings["length"])
    characters = build_character_set(passages, tokenizer, batch_size=16)

    @torch.no_grad()
    def ask(asked: Any) -> Any:
        loss, number, device = 0.0, 0, next(model.parameters()).device
        for batch in asked.batches:
            mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings["bf16"]):
                logits = model(input_ids=batch.input_ids.to(device), attention_mask=mask).logits
            own = logits.flatten(0, 1)[batch.masked_positions.to(device)].float()
            loss += float(nn.functional.cross_entropy(own, batch.labels.to(device), reduction="sum"))
            number += batch.num_masked
        return Scores(loss, num_tokens=number)

    def score() -> float:
        model.eval()
        bits = measure_bits(ask(characters), characters)
        model.train()
        return bits

    return score


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if sys.argv[1] == "adapters":
        serve_adapters(given)
    else:
        Path(given["output"]).write_text(json.dumps(run_mlm(given)), encoding="utf-8")
