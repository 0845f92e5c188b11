"""prepare -> pretrain -> export -> report: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, identity.json, tokenizer/,
metrics.jsonl, tensorboard/, checkpoints/, export/, summary.json, curves.png and report.html. The same command goes on
from the newest checkpoint, and says so when there is nothing left to do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.config import MethodConfig, PretrainConfig, dump_yaml, identity_of
from domext_ray.corpus.extension import (
    ExtensionVocabulary,
    count_brought_words,
    format_statistics,
    import_words,
    learn_extension,
    load_extension,
    measure_extension,
)
from domext_ray.corpus.manifest import Manifest, verify_shards
from domext_ray.corpus.shards import prepare_corpus
from domext_ray.corpus.sources import resolve_sources
from domext_ray.corpus.vocab import fingerprint_tokenizer, learn_wordpiece, load_tokenizer
from domext_ray.errors import ConfigError
from domext_ray.export import export_run
from domext_ray.model.base import SHIPPED_BASE, Base, load_base
from domext_ray.model.budget import TOLERANCE, solve_budget
from domext_ray.model.counts import ParameterCounts, count_parameters
from domext_ray.model.graft import Extensions, describe_shape
from domext_ray.report import format_summary, write_report
from domext_ray.run_directory import (
    RunPaths,
    check_identity,
    hold_run,
    is_finished,
    read_identity,
    resolve_paths,
    resolve_schedule,
)
from domext_ray.summary import describe_manifest, describe_plan, describe_sources, write_summary
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.evaluate import read_probe
from domext_ray.training.metrics import write_text
from domext_ray.training.phases import make_phases
from domext_ray.training.pretrain import pretrain, start_ray
from domext_ray.training.start import check_start, read_extensions
from domext_ray.training.worker import PretrainTask

ConfigT = TypeVar("ConfigT", bound=PretrainConfig)


def run_pretraining(config: PretrainConfig) -> Path:
    """Carry a pre-training run from text to report.

    Args:
        config: the run; with `dry_run` everything is checked and printed and nothing is started or written.

    Returns:
        The run's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is written where that can be known.
    """
    paths = resolve_paths(config)
    config = resolve_schedule(resolve_files(config), paths.run)
    base = _load_base(config)
    read_probe(config.train.general_probe)
    base_sha256 = base.sha256 if base else "none"
    init_sha256 = _resolve_start(config, base_sha256, paths) if config.init_from else ""
    earlier = _read_earlier(config, paths)
    config, counts = size_method(config, base, count_planned_words(config, base), earlier)
    identity = {**identity_of(config), "base_sha256": base_sha256}
    if config.init_from:
        identity["init_sha256"] = init_sha256
    check_identity(paths.run, identity)
    if config.dry_run:
        resolve_sources(config.corpus, config.prepare)
        print(describe_plan(config, paths, counts))
    elif is_finished(paths.run, config):
        print(
            f"the run in {paths.run} has reached its limit; nothing is left to do (a larger --train.max_steps, "
            "max_tokens or max_seconds goes on, another --run.name starts anew)."
        )
    else:
        print(f"run directory: {paths.run}", flush=True)
        with hold_run(paths.run):
            _train(config, base, paths, identity, earlier)
    return paths.run


def resolve_files(config: ConfigT) -> ConfigT:
    """Make the paths absolute that workers read: they run in folders of their own."""
    base, probe = Path(config.base).expanduser(), config.train.general_probe
    if config.base != SHIPPED_BASE and base.is_dir():
        config = replace(config, base=str(base.resolve()))
    if probe:
        config = replace(config, train=replace(config.train, general_probe=str(Path(probe).expanduser().resolve())))
    return config


def _train(
    config: PretrainConfig, base: Base | None, paths: RunPaths, identity: dict[str, Any], earlier: Extensions | None
) -> None:
    """Prepare, train, export and report, in a run's directory that this job holds."""
    start_ray()
    tokenizer_dir = _provide_tokenizer(config, base, paths)
    vocab_size, num_new_words = _count_words(tokenizer_dir)
    counts = _count_parameters(config, base, vocab_size, num_new_words, earlier)
    _check_budget(config, counts, num_new_words)
    start = Path(config.init_from).expanduser().resolve() if config.init_from else None
    if start is not None and find_latest(paths.run / "checkpoints") is None:
        check_start(start, identity["base_sha256"], tokenizer_dir)
    manifests = _prepare(config, tokenizer_dir, paths)
    for manifest in manifests:
        verify_shards(manifest)
    _print_corpus(config, manifests)
    identity = {**identity, "corpus_fingerprint": manifests[0].fingerprint}
    check_identity(paths.run, identity)
    write_text(paths.run / "config.yaml", dump_yaml(config))
    write_text(paths.run / "identity.json", json.dumps(identity, indent=2) + "\n")
    folders = tuple(manifest.folder for manifest in manifests)
    pretrain(PretrainTask(config, paths.run, folders, tokenizer_dir, identity["base_sha256"], start, earlier))
    summary = write_summary(paths.run, config, counts, manifests[0])
    export_run(paths.run, paths.run / "export")
    page = write_report(paths.run)
    print(format_summary(summary))
    print(f"export: {paths.run / 'export'}\nreport: {page}")


def _read_earlier(config: PretrainConfig, paths: RunPaths) -> Extensions | None:
    """Extensions that the model has beside the method's own: those of its checkpoints, or of the run it starts from."""
    if not config.init_from:
        return None
    return read_extensions(paths.run) or read_extensions(Path(config.init_from).expanduser().resolve())


def size_method(
    config: PretrainConfig, base: Base | None, num_new_words: int, earlier: Extensions | None = None
) -> tuple[PretrainConfig, ParameterCounts]:
    """Replace the method's sizes by those that its trainable budget asks for, and count parameters.

    Args:
        config: the run.
        base: its base; None for random weights.
        num_new_words: words beside the base's.
        earlier: extensions that the model has beside the method's own.

    Returns:
        The run with its sizes, and its counts.

    Raises:
        ConfigError: the method does not fit the base, or no size meets the budget.
    """
    vocab_size = config.vocab.size if base is None else base.config.vocab_size

    def count(method: MethodConfig) -> ParameterCounts:
        return _count_parameters(replace(config, method=method), base, vocab_size, num_new_words, earlier)

    method = config.method
    if base is not None:
        num_heads, hidden_size = base.config.num_attention_heads, base.config.hidden_size
        method = solve_budget(
            method, lambda each: count(each).trainable_frac, num_heads=num_heads, hidden_size=hidden_size
        )
    return replace(config, method=method), count(method)


def _check_budget(config: PretrainConfig, counts: ParameterCounts, num_new_words: int) -> None:
    """Refuse a budget that was solved for a vocabulary of another size than the text gave."""
    budget = config.method.trainable_budget
    if budget and abs(counts.trainable_frac - budget) > TOLERANCE * budget:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size} and the text gave {num_new_words}, so that the method trains "
            f"{counts.trainable_frac:.2%} instead of --method.trainable_budget {budget:g}; give --vocab.size "
            f"{num_new_words}."
        )


def _prepare(config: PretrainConfig, tokenizer_dir: Path, paths: RunPaths) -> list[Manifest]:
    """Prepare the corpus for every length phase."""
    lengths = [each for each in (config.train.seq_length, config.train.long_seq_length) if each]
    return [
        prepare_corpus(
            config.corpus, config.prepare, tokenizer_dir, length, paths.corpora, pairs=config.objective.next_sentence
        )
        for length in lengths
    ]


def _resolve_start(config: PretrainConfig, base_sha256: str, paths: RunPaths) -> str:
    """The hash of the tensors that a run starts from: the stored one once it has checkpoints of its own."""
    stored = read_identity(paths.run)
    if stored is not None and "init_sha256" in stored and find_latest(paths.run / "checkpoints") is not None:
        return str(stored["init_sha256"])
    return check_start(Path(config.init_from).expanduser().resolve(), base_sha256)


def run_vocabulary(config: PretrainConfig) -> ExtensionVocabulary | None:
    """Learn an extension vocabulary, or take one's own words, into RUN.DIR/RUN.NAME.

    Args:
        config: the run; with `dry_run` what would be read is printed and nothing is started or written.

    Returns:
        The vocabulary; None after a dry run.

    Raises:
        DomextError: any mistake of the user's.
    """
    paths = resolve_paths(config)
    base = _load_base(config)
    if base is None or not config.vocab.extends_base:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size}; give the number of new words (for example 5000), or --vocab.words, "
            "and a --base that they stand beside."
        )
    if config.dry_run:
        count_planned_words(config, base)  # brought words are checked
        print(describe_sources(resolve_sources(config.corpus, config.prepare), paths))
        return None
    vocabulary = _provide_extension(config, base, paths.run)
    if config.vocab.words:
        start_ray()
        measure_extension(config.corpus, config.prepare, vocabulary.folder)
    print(f"{format_statistics(vocabulary.folder)}\nvocabulary: {vocabulary.folder}")
    return vocabulary


def _provide_extension(config: PretrainConfig, base: Base, folder: Path) -> ExtensionVocabulary:
    """The tokenizer over base and new words, in `folder`."""
    known = _describe_known(config, base)
    if config.vocab.words:
        return import_words(config.vocab, folder=folder, **known)
    start_ray()
    return learn_extension(config.corpus, config.prepare, config.vocab, folder=folder, **known)


def _describe_known(config: PretrainConfig, base: Base) -> dict[str, Any]:
    """What an extension vocabulary must know of its base."""
    return {
        "base": config.base,
        "tokenizer_folder": base.tokenizer_folder,
        "num_base_rows": base.config.vocab_size,
    }


def run_preparation(config: PretrainConfig) -> Manifest | None:
    """Prepare a corpus where a run of the same options will look for it.

    Args:
        config: the run; with `dry_run` what would be read is printed and nothing is started or written.

    Returns:
        The prepared corpus; None after a dry run.

    Raises:
        DomextError: any mistake of the user's.
    """
    paths = resolve_paths(config)
    base = _load_base(config)
    if config.dry_run:
        print(describe_sources(resolve_sources(config.corpus, config.prepare), paths))
        return None
    start_ray()
    is_own = base is not None and not config.vocab.extends_base
    tokenizer_dir = base.tokenizer_folder if base and is_own else _provide_tokenizer(config, base, paths)
    manifests = _prepare(config, tokenizer_dir, paths)
    for manifest in manifests:
        print(describe_manifest(manifest))
    return manifests[0]


def provide_inputs(config: PretrainConfig) -> tuple[Path, int, Manifest]:
    """Make what a run reads, its tokenizer in RUN.DIR/RUN.NAME, or take what was made before; Ray is initialised.

    Returns:
        The tokenizer's folder, its words beside the base's, and the prepared corpus, whose shards are verified.

    Raises:
        DomextError: any mistake of the user's.
    """
    paths = resolve_paths(config)
    tokenizer_dir = _provide_tokenizer(config, _load_base(config), paths)
    manifest = _prepare(config, tokenizer_dir, paths)[0]
    verify_shards(manifest)
    return tokenizer_dir, _count_words(tokenizer_dir)[1], manifest


def count_planned_words(config: PretrainConfig, base: Base | None) -> int:
    """New words that a run will have, as far as options tell: a learned vocabulary may find fewer."""
    if base is None or not config.vocab.words:
        return 0 if base is None else config.vocab.size
    return count_brought_words(config.vocab, **_describe_known(config, base))


def _load_base(config: PretrainConfig) -> Base | None:
    """Load the base, and refuse options that do not fit it."""
    if config.base == "none":
        return None
    base = load_base(config.base, next_sentence=config.objective.next_sentence)
    longest = base.config.max_row_length
    for name in ("seq_length", "long_seq_length"):
        length = getattr(config.train, name)
        if length > longest:
            raise ConfigError(f"--train.{name} is {length}; the base {config.base!r} has positions for {longest}.")
    return base


def _count_words(tokenizer_dir: Path) -> tuple[int, int]:
    """Words of the base, and new ones, in a run's tokenizer."""
    extension = load_extension(tokenizer_dir)
    num_new = 0 if extension is None else len(extension.words)
    return len(load_tokenizer(tokenizer_dir)) - num_new, num_new


def _count_parameters(
    config: PretrainConfig,
    base: Base | None,
    vocab_size: int,
    num_new_words: int,
    earlier: Extensions | None,
) -> ParameterCounts:
    next_sentence = config.objective.next_sentence
    shape = describe_shape(
        base,
        config.shape,
        config.method,
        vocab_size=vocab_size,
        num_new_words=num_new_words,
        next_sentence=next_sentence,
        earlier=earlier,
    )
    return count_parameters(shape, config.method, base.heads if base else (), next_sentence=next_sentence)


def _provide_tokenizer(config: PretrainConfig, base: Base | None, paths: RunPaths) -> Path:
    """The run's tokenizer, in the run's directory: the base's own, with new words or without, or a learned one."""
    folder = paths.run / "tokenizer"
    if base is None:
        return learn_wordpiece(
            config.corpus, config.prepare, config.vocab, folder, config.shape.max_position_embeddings
        )
    if config.vocab.extends_base:
        return _provide_extension(config, base, folder).folder
    tokenizer = load_tokenizer(base.tokenizer_folder)
    if folder.exists() and fingerprint_tokenizer(load_tokenizer(folder)) == fingerprint_tokenizer(tokenizer):
        return folder
    tokenizer.save_pretrained(folder)
    return folder


def _print_corpus(config: PretrainConfig, manifests: list[Manifest]) -> None:
    for phase in make_phases(config, manifests):
        manifest, plan = phase.manifest, phase.plan
        num_steps = max(0, min(config.train.max_steps, phase.end_step) - phase.first_step)
        print(
            f"corpus: {manifest.num_rows('train'):,} rows of {manifest.seq_length} tokens at most, "
            f"{manifest.num_tokens('train'):,} tokens for training, {manifest.num_rows('held_out'):,} rows held out; "
            f"{plan.batches_per_epoch:,} steps an epoch ({plan.num_dropped_rows} rows of it fill no batch), "
            f"{num_steps / plan.batches_per_epoch:.2f} epochs",
            flush=True,
        )
