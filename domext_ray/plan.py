"""A run's plan: everything that can be known, and refused, before its corpus is prepared.

Enters: a `PretrainConfig`. Leaves: a `RunPlan`, which preparation, training, export and report read and nobody makes
again. Nothing is started or written; the run's directory is only looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.shards import identify_corpus
from domext_ray.data.sources import resolve_sources
from domext_ray.errors import ConfigError
from domext_ray.model.base import Base, describe_base, load_base
from domext_ray.model.base_folder import SHIPPED_BASE
from domext_ray.model.budget import solve_budget
from domext_ray.model.counts import ParameterCounts, count_parameters
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.graft import Extensions, describe_shape
from domext_ray.options.build import identity_of
from domext_ray.runs.run_directory import (
    RunPaths,
    check_identity,
    keep_precision,
    read_identity,
    resolve_paths,
    resolve_schedule,
)
from domext_ray.runtime.ray_cluster import resolve_gpu, resolve_precision
from domext_ray.storage import hash_values
from domext_ray.training.checkpoint import CheckpointId, find_latest
from domext_ray.training.evaluate import read_probe
from domext_ray.training.start import check_start, read_extensions
from domext_ray.training.vectors import count_decoder
from domext_ray.vocabulary.base_vocabulary import BaseVocabulary, read_base_vocabulary
from domext_ray.vocabulary.learn import count_new_words
from domext_ray.vocabulary.tokenizer import load_tokenizer

ConfigT = TypeVar("ConfigT", bound=PretrainConfig)


@dataclass(frozen=True)
class RunPlan:
    """A run before its first file is written.

    Args:
        config: the run; paths that workers read are absolute, sizes solved, the schedule fixed as far as it is known.
        paths: where the run lives.
        base: its base; None for random weights.
        num_new_words: words beside the base's, as far as options tell: a learned vocabulary may find fewer.
        counts: its parameters, with that many words.
        earlier: extensions that the model has beside the method's own.
        start: directory of the run whose parameters this one starts from, if any.
        starts_from: the checkpoint of `start`; None also once the run has checkpoints of its own.
        identity: what makes it this run and no other, as far as it is known before the corpus is.
    """

    config: PretrainConfig
    paths: RunPaths
    base: Base | None
    num_new_words: int
    counts: ParameterCounts
    earlier: Extensions | None
    start: Path | None
    starts_from: CheckpointId | None
    identity: dict[str, Any]


def plan_run(config: PretrainConfig) -> RunPlan:
    """Check a run and solve all that its options leave open.

    Raises:
        DomextError: any mistake of the user's that shows before the corpus is read.
    """
    paths = resolve_paths(config)
    config = resolve_schedule(resolve_files(resolve_workers(keep_precision(config, paths.run))), paths.run)
    base = load_run_base(config)
    read_probe(config.train.general_probe)
    identity: dict[str, Any] = {"base_sha256": base.sha256 if base else "none"}
    if base is not None:
        identity["base_shape"] = describe_base(base.config)
    start, starts_from, earlier = None, None, None
    if config.init_from:
        start = Path(config.init_from).expanduser().resolve()
        identity["init_sha256"], starts_from = _find_start(config, start, identity["base_sha256"], paths)
        earlier = read_extensions(paths.run) or read_extensions(start)
    config, num_new_words, counts = size_run(config, base, earlier)
    identity = {**identity_of(config), **identity}
    check_identity(paths.run, {**identity, **_find_moved_corpus(config, paths)})
    return RunPlan(config, paths, base, num_new_words, counts, earlier, start, starts_from, identity)


def resolve_files(config: ConfigT) -> ConfigT:
    """Make the paths absolute that workers read: they run in folders of their own."""
    base, probe = Path(config.base).expanduser(), config.train.general_probe
    if config.base != SHIPPED_BASE and base.is_dir():
        config = replace(config, base=str(base.resolve()))
    if probe:
        config = replace(config, train=replace(config.train, general_probe=str(Path(probe).expanduser().resolve())))
    return config


def resolve_workers(config: PretrainConfig) -> PretrainConfig:
    """Settle `--scale.use_gpu auto` and `--engine.precision auto` once it is known; before Ray starts it may not be."""
    return resolve_precision(resolve_gpu(config, config.scale.num_workers, "--scale.num_workers"))


def load_run_base(config: PretrainConfig) -> Base | None:
    """Load a run's base, None for random weights, and refuse options that do not fit it.

    Raises:
        BaseModelError: it is not to be had, or is no base.
        ConfigError: rows are longer than its positions, or it has no predictions to keep.
    """
    if config.base == "none":
        return None
    base = load_base(config.base, next_sentence=config.objective.next_sentence)
    longest = base.config.max_row_length
    for name in ("seq_length", "long_seq_length"):
        length = getattr(config.train, name)
        if length > longest:
            raise ConfigError(f"--train.{name} is {length}; the base {config.base!r} has positions for {longest}.")
    if config.replay.is_written and not base.has_mlm_head:
        raise ConfigError(
            f"--replay.corpus is self, and the base {config.base!r} has no MLM head to write general text with; give "
            "general text, or none."
        )
    if config.has_general_text and config.objective.keep == "kl" and not base.has_mlm_head:
        raise ConfigError(
            f"--objective.keep is kl, and the base {config.base!r} has no MLM head whose predictions could be kept; "
            "give replay or none."
        )
    return base


def size_run(
    config: ConfigT, base: Base | None, earlier: Extensions | None = None, num_new_words: int | None = None
) -> tuple[ConfigT, int, ParameterCounts]:
    """Solve the sizes that a method's trainable budget asks for, and count parameters.

    Args:
        config: the run.
        base: its base; None for random weights.
        earlier: extensions that the model has beside the method's own.
        num_new_words: words beside the base's, where they are known; None: as options tell.

    Returns:
        The run with its sizes, the new words, and the counts.

    Raises:
        ConfigError: the method does not fit the base, no size meets the budget, or given words do not fit.
    """
    number = count_planned_words(config, base) if num_new_words is None else num_new_words
    vocab_size = config.vocab.size if base is None else base.config.vocab_size

    def count(method: MethodConfig) -> ParameterCounts:
        return count_run(replace(config, method=method), base, vocab_size, number, earlier)

    method = config.method
    if base is not None:
        num_heads, hidden_size = base.config.num_attention_heads, base.config.hidden_size
        method = solve_budget(
            method, lambda each: count(each).trainable_frac, num_heads=num_heads, hidden_size=hidden_size
        )
    return replace(config, method=method), number, count(method)


def count_run(
    config: PretrainConfig, base: Base | None, vocab_size: int, num_new_words: int, earlier: Extensions | None
) -> ParameterCounts:
    """Count a run's parameters.

    Args:
        config: the run.
        base: its base; None for random weights.
        vocab_size: words of the tokenizer, the new ones not counted.
        num_new_words: the new ones.
        earlier: extensions that the model has beside the method's own.
    """
    shape = describe_run(config, base, vocab_size, num_new_words, earlier)
    heads, next_sentence = base.heads if base else (), config.objective.next_sentence
    reads_words = config.objective.reads_words
    counts = count_parameters(shape, config.method, heads, next_sentence=next_sentence, reads_words=reads_words)
    longest = max(config.train.seq_length, config.train.long_seq_length)
    return replace(counts, decoder=count_decoder(config.objective, counts.hidden_size, longest))


def describe_run(
    config: PretrainConfig, base: Base | None, vocab_size: int, num_new_words: int, earlier: Extensions | None
) -> DomextConfig:
    """Return the shape of a run's model; see `count_run`."""
    return describe_shape(
        base,
        config.shape,
        config.method,
        vocab_size=vocab_size,
        num_new_words=num_new_words,
        next_sentence=config.objective.next_sentence,
        earlier=earlier,
    )


def count_planned_words(config: PretrainConfig, base: Base | None) -> int:
    """New words that a run will have, as far as options tell: a learned vocabulary may find fewer."""
    if base is None or not config.vocab.extends_base:
        return 0
    return count_new_words(config.vocab, read_run_vocabulary(config, base))


def read_run_vocabulary(config: PretrainConfig, base: Base) -> BaseVocabulary:
    """The vocabulary that a run's new words stand beside."""
    return read_base_vocabulary(config.base, base.tokenizer_folder, base.config.vocab_size)


def _find_start(
    config: PretrainConfig, start: Path, base_sha256: str, paths: RunPaths
) -> tuple[str, CheckpointId | None]:
    """The hash of the tensors that a run starts from, and where they are; of a run with checkpoints the stored hash."""
    stored = read_identity(paths.run)
    if stored is not None and "init_sha256" in stored and find_latest(paths.run / "checkpoints") is not None:
        return str(stored["init_sha256"]), None
    if not start.is_dir():
        raise ConfigError(f"--init_from is {config.init_from!r}, which does not exist; give the directory of a run.")
    found = check_start(start, base_sha256)
    return found.tensors_sha256, found.id


def _find_moved_corpus(config: PretrainConfig, paths: RunPaths) -> dict[str, str]:
    """The fingerprint that a run's corpus has under another name; nothing where it is called as before or is another.

    It is known before the corpus is prepared: the run has its tokenizer already.
    """
    stored = read_identity(paths.run) or {}
    if stored.get("corpus", config.corpus) == config.corpus or not (paths.run / "tokenizer").is_dir():
        return {}
    sources, tokenizer = (
        resolve_sources(config.corpus, config.prepare),
        load_tokenizer((paths.run / "tokenizer").local()),
    )
    pairs = config.objective.next_sentence
    found = hash_values(identify_corpus(sources, config.prepare, tokenizer, config.train.seq_length, pairs))
    return {"corpus_fingerprint": found} if found == stored.get("corpus_fingerprint") else {}
