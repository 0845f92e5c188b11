"""The verbs that make a model of a text: pretrain METHOD; prepare corpus and build vocab may go before it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from domext_ray.commands.early import check_early, write_early
from domext_ray.commands.job import FOLDER, TEXT, WITHOUT_BASE, Job
from domext_ray.config.pretrain import PretrainConfig


def _pretrain(config: PretrainConfig, preset: str = "") -> None:
    with write_early(config):
        from domext_ray.pretraining.pipeline import run_pretraining

        run_pretraining(config, preset, started=_find_process_start())


def _find_process_start() -> float | None:
    """When this process was started, as `time.time()` has it; None where the system has no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except OSError:
        return None
    # psutil's figure is up to a second off.
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _make_method(
    name: str,
    about: str,
    main: tuple[str, ...],
    reads: tuple[str, ...] = WITHOUT_BASE,
    preset: str = "",
    plain_preset: str = "",
) -> Job[PretrainConfig]:
    """The verb of a method, whose preset has its name unless told otherwise."""
    preset = preset or name
    layers = f"Options come from the preset {preset} (domext presets show {preset}), then --config, then flags."
    if plain_preset:
        layers += f"\nWith --replay.corpus none the preset is {plain_preset}."
    return Job(
        f"pretrain {name}",
        f"{about}\n\n{layers}",
        PretrainConfig,
        _pretrain,
        preset,
        plain_preset,
        main=(*TEXT, *main),
        reads=reads,
        tells_preset=True,
        check=check_early,
    )


AF = _make_method(
    "af",
    """AF Adapter: freeze a BERT, train extra attention heads and FFN units on your text, get a Hugging Face model.

It also shifts the embeddings of the base's words. On general text, which the base itself writes, it learns to predict
what the base predicts.

    domext pretrain af                                  # the base that ships, and text that every machine has
    domext pretrain af --base bert-base-uncased --corpus 'texts/*.jsonl' --run.name clinic
    domext pretrain af … --replay.corpus general.txt    # your general text instead of the base's
    domext pretrain af … --replay.corpus none           # heads and units alone, as in the paper
    domext pretrain af … --preset af_routed             # its router leaves other text to the base""",
    ("replay.corpus", "method.heads", "method.ffn_units"),
    preset="af_words",
    plain_preset="af",
)

BERT = _make_method(
    "bert",
    """BERT pre-training: every parameter trains, from random weights (--base none) or from a base.

    domext pretrain bert --base none --vocab.size 8192 --corpus 'texts/*.txt' --run.name small-bert
    domext pretrain bert --preset bert_base --corpus 'texts/*.txt'              # continued pre-training""",
    ("vocab.size", "objective.whole_word"),
    reads=(),
)

BOTTLENECK = _make_method(
    "bottleneck",
    """Houlsby's bottleneck adapters: two per layer, with shifts of its LayerNorms, next to a frozen base.

    domext pretrain bottleneck --preset bottleneck_base --corpus 'texts/*.txt' --run.name clinic
    domext pretrain bottleneck … --method.bottleneck_size 8 --method.layers 6-11 --method.init paper
    domext pretrain bottleneck … --init_from runs/clinic --method.adapter cardiology --run.name clinic-2
                                            # a second adapter; the first one is frozen""",
    ("method.bottleneck_size", "method.layers"),
)

EXBERT = _make_method(
    "exbert",
    """exBERT: new words of the domain, and a gated extension module next to every frozen layer.

    domext pretrain exbert --corpus 'texts/*.txt' --train.max_steps 0 --train.epochs 1 --run.name clinic
    domext pretrain exbert --preset exbert_base --corpus 'texts/*.txt' --run.name clinic    # with a BERT-base
    domext pretrain exbert … --vocab.size 0 --vocab.words runs/words         # words of domext build vocab
    domext pretrain exbert … --vocab.size 0 --vocab.words runs/clinic/tokenizer --init_from runs/clinic \\
        --method.trains all --run.name clinic-2         # second stage: every parameter trains

Without modules: --method.module_hidden_size 0 --method.module_ffn_size 0; without new words: --vocab.size 0.""",
    ("vocab.size", "method.module_hidden_size", "method.module_ffn_size"),
)

LORA = _make_method(
    "lora",
    """LoRA: low-rank updates of a frozen base's matrices, through peft; the exported model has them merged.

    domext pretrain lora --preset lora_base --corpus 'texts/*.txt' --run.name clinic
    domext pretrain lora … --method.lora_rank 8 --method.lora_targets query,value""",
    ("method.lora_rank", "method.lora_targets"),
)

METHODS = {job.verb.split()[1]: job for job in (AF, BOTTLENECK, EXBERT, LORA, BERT)}
"""The methods of pretrain, by name."""


PREPARE = Job(
    "prepare corpus",
    """Prepare a corpus before training: text becomes shards of token rows, which the training job finds.

    domext prepare corpus --corpus 'texts/*.jsonl' --base bert-base-uncased --train.seq_length 512
    domext prepare corpus --corpus big.txt --dry_run true     # only list what would be read

A corpus depends on --corpus, --prepare.*, --base, --vocab.*, --train.seq_length and --objective.next_sentence. You may
also give training's other options, which have no effect here.""",
    PretrainConfig,
    "pretraining.inputs:run_preparation",
    "af",
    main=(*TEXT, "prepare.shard_bytes", "prepare.cache_dir", "vocab.size"),
    reads=(
        *("base", "corpus", "prepare.", "vocab.", "train.seq_length", "train.long_seq_length"),
        *("objective.next_sentence", "scale.wait", *FOLDER),
    ),
    check=check_early,
)


VOCAB = Job(
    "build vocab",
    """Learn new words of a domain for a base, and show what vocabularies of other sizes would save.

    domext build vocab --corpus 'texts/*.jsonl' --base bert-base-uncased --vocab.size 5000 --run.name words
    domext build vocab --vocab.words words.txt --base bert-base-uncased       # your own words, one per line
    domext pretrain exbert --vocab.size 0 --vocab.words runs/words …    # uses them

You may also give training's other options, which have no effect here.""",
    PretrainConfig,
    "pretraining.inputs:run_vocabulary",
    "vocab",
    main=(*TEXT, "vocab.size", "vocab.min_frequency", "vocab.whole_words", "vocab.words", "vocab.skip", "vocab.extend"),
    reads=("base", "corpus", "prepare.", "vocab.", "-vocab.lowercase", "scale.wait", *FOLDER),
    check=check_early,
)

JOBS: tuple[Job[Any], ...] = (*METHODS.values(), PREPARE, VOCAB)
