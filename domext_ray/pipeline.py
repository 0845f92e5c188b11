"""prepare -> pretrain -> export -> report: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, identity.json, tokenizer/,
metrics.jsonl, tensorboard/, checkpoints/, export/, summary.json, curves.png and report.html. The same command goes on
from the newest checkpoint, and says so when there is nothing left to do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.config.identity import identity_of
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.shards import identify_corpus, prepare_corpus
from domext_ray.corpus.texts.check import check_corpus
from domext_ray.corpus.texts.sources import resolve_sources
from domext_ray.corpus.texts.work_folder import make_folder_anew
from domext_ray.corpus.vocabulary.extension import (
    ExtensionVocabulary,
    check_given_words,
    count_brought_words,
    format_statistics,
    import_words,
    learn_extension,
    load_extension,
    measure_extension,
)
from domext_ray.corpus.vocabulary.vocab import fingerprint_tokenizer, learn_wordpiece, load_tokenizer
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.export.folder import HUGGINGFACE, check_target
from domext_ray.export.model_folder import export_run
from domext_ray.files import hash_values
from domext_ray.model.base import SHIPPED_BASE, Base, describe_base, load_base
from domext_ray.model.budget import TOLERANCE, solve_budget
from domext_ray.model.counts import ParameterCounts, count_parameters
from domext_ray.model.graft import Extensions, describe_shape
from domext_ray.report.forecast import Forecast, make_forecast
from domext_ray.report.report import format_summary, write_report
from domext_ray.report.summary import (
    describe_end,
    describe_manifest,
    describe_plan,
    describe_sources,
    is_finished,
    write_summary,
)
from domext_ray.runs.run_directory import (
    RunPaths,
    check_identity,
    check_made_with,
    hold_run,
    read_config,
    read_identity,
    resolve_paths,
    resolve_schedule,
    write_config,
    write_identity,
    write_made_with,
)
from domext_ray.runtime.ray_cluster import settle_gpu, start_ray
from domext_ray.training.checkpoint import (
    CheckpointId,
    choose_checkpoint,
    find_latest,
    identify_checkpoint,
    read_tensors_sha256,
)
from domext_ray.training.evaluate import read_probe
from domext_ray.training.metrics import find_last_step
from domext_ray.training.phases import FIRST_ORDER, describe_order, make_phases, resolve_max_steps
from domext_ray.training.pretrain import pretrain, reserve
from domext_ray.training.rate import measure_rate
from domext_ray.training.start import check_start, read_extensions
from domext_ray.training.worker import PretrainTask

ConfigT = TypeVar("ConfigT", bound=PretrainConfig)

FEW_EPOCHS = 0.1
"""Below this a run says how little of its corpus it reads."""


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
    config = _settle_gpu(config)
    config = resolve_schedule(resolve_files(config), paths.run)
    base = _load_base(config)
    read_probe(config.train.general_probe)
    base_sha256 = base.sha256 if base else "none"
    init_sha256, starts_from = _resolve_start(config, base_sha256, paths) if config.init_from else ("", None)
    earlier = _read_earlier(config, paths)
    config, counts = size_method(config, base, count_planned_words(config, base), earlier)
    identity = {**identity_of(config), "base_sha256": base_sha256}
    if base is not None:
        identity["base_shape"] = describe_base(base.config)
    if config.init_from:
        identity["init_sha256"] = init_sha256
    check_identity(paths.run, {**identity, **_find_moved_corpus(config, paths)}, PretrainConfig)
    if config.dry_run:
        check_corpus(config.corpus, config.prepare)
        _look_back(paths.run)
        print(describe_plan(config, paths, counts, _forecast(config, base, counts, earlier)))
    elif is_finished(paths.run, config):
        _say_finished(paths, config)
    else:
        check_corpus(config.corpus, config.prepare)
        origin = Origin(_look_back(paths.run), starts_from, earlier)
        start_ray()
        config = _settle_gpu(config)
        reserve(config)
        print(f"run directory: {paths.run}", flush=True)
        with hold_run(paths.run):
            _train(config, base, paths, identity, origin)
    return paths.run


def resolve_files(config: ConfigT) -> ConfigT:
    """Make the paths absolute that workers read: they run in folders of their own."""
    base, probe = Path(config.base).expanduser(), config.train.general_probe
    if config.base != SHIPPED_BASE and base.is_dir():
        config = replace(config, base=str(base.resolve()))
    if probe:
        config = replace(config, train=replace(config.train, general_probe=str(Path(probe).expanduser().resolve())))
    return config


def _forecast(
    config: PretrainConfig, base: Base | None, counts: ParameterCounts, earlier: Extensions | None
) -> Forecast:
    """What the run will take; its corpus is read in part, and its model is timed for a moment."""
    sources = resolve_sources(config.corpus, config.prepare)
    num_new_words = count_planned_words(config, base)

    def measure() -> float:
        return measure_rate(config, base, config.vocab.size, num_new_words, earlier)

    return make_forecast(config, base, sources, counts, measure)


def _say_finished(paths: RunPaths, config: PretrainConfig) -> None:
    _note_moved(paths.run, config)
    print(describe_end(paths.run, config))


@dataclass(frozen=True)
class Origin:
    """Where a run's parameters come from, beside its base.

    Args:
        own: its own checkpoint that it goes on from; None: it begins.
        starts_from: the checkpoint of `init_from`; None also once the run has its own.
        earlier: extensions that the model has beside the method's own.
    """

    own: CheckpointId | None
    starts_from: CheckpointId | None
    earlier: Extensions | None


def _train(
    config: PretrainConfig, base: Base | None, paths: RunPaths, identity: dict[str, Any], origin: Origin
) -> None:
    """Prepare, train, export and report, in a run's directory that this job holds."""
    check_target(paths.run / "export", HUGGINGFACE)
    tokenizer_dir = _provide_tokenizer(config, base, paths)
    vocab_size, num_new_words = _count_words(tokenizer_dir)
    counts = _count_parameters(config, base, vocab_size, num_new_words, origin.earlier)
    _check_budget(config, counts, num_new_words)
    start = Path(config.init_from).expanduser().resolve() if config.init_from else None
    if start is not None and origin.own is None:
        check_start(start, identity["base_sha256"], tokenizer_dir)
    manifests = _prepare(config, tokenizer_dir, paths)
    if config.train.epochs or not config.train.max_steps:
        config = resolve_schedule(resolve_max_steps(config, manifests), paths.run)
        if is_finished(paths.run, config):
            return _say_finished(paths, config)
    _print_corpus(config, manifests)
    identity = {**identity, **identity_of(config), "corpus_fingerprint": manifests[0].fingerprint}
    check_identity(paths.run, identity, PretrainConfig)
    write_config(paths.run, config)
    write_identity(paths.run, identity)
    write_made_with(paths.run, describe_order(), origin.own.step if origin.own else 0)
    folders = tuple(manifest.folder for manifest in manifests)
    pretrain(
        PretrainTask(
            config,
            paths.run,
            folders,
            tokenizer_dir,
            identity["base_sha256"],
            init_from=start,
            earlier=origin.earlier,
            goes_on_from=origin.own,
            starts_from=origin.starts_from,
        )
    )
    summary = write_summary(paths.run, config, counts, manifests[0])
    page = write_report(paths.run)
    export_run(paths.run, paths.run / "export")  # last: by its record a later start sees that all of this was done
    print(format_summary(summary))
    print(f"export: {paths.run / 'export'}\nreport: {page}")


def _find_moved_corpus(config: PretrainConfig, paths: RunPaths) -> dict[str, str]:
    """The fingerprint that a run's corpus has under another name; nothing where it is called as before or is another.

    It is known before the corpus is prepared: the run has its tokenizer already.
    """
    stored = read_identity(paths.run) or {}
    if stored.get("corpus", config.corpus) == config.corpus or not (paths.run / "tokenizer").is_dir():
        return {}
    sources, tokenizer = resolve_sources(config.corpus, config.prepare), load_tokenizer(paths.run / "tokenizer")
    known, pairs = stored.get("corpus_fingerprint", ""), config.objective.next_sentence
    found = hash_values(identify_corpus(sources, config.prepare, tokenizer, config.train.seq_length, pairs, known))
    return {"corpus_fingerprint": found} if found == known else {}


def _note_moved(run_dir: Path, config: PretrainConfig) -> None:
    """Keep where the base and the text of a finished run are now: an export of it reads the base again."""
    stored = read_config(run_dir, PretrainConfig)
    moved = replace(stored, base=config.base, corpus=config.corpus, init_from=config.init_from)
    if moved != stored:
        write_config(run_dir, moved)


def _look_back(run_dir: Path) -> CheckpointId | None:
    """Choose the checkpoint that a run goes on from, and say what has changed since; None: it begins anew."""
    for changed in check_made_with(run_dir, describe_order(), FIRST_ORDER):
        print(f"note: {changed} since this run's last start; losses may differ in their last digits.", flush=True)
    choice = choose_checkpoint(run_dir / "checkpoints")
    for sentence in choice.passed_over:
        print(f"warning: {sentence}", flush=True)
    if choice.path is not None:
        return identify_checkpoint(choice.path)
    step = find_last_step(run_dir / "metrics.jsonl")
    if step:
        print(f"note: step {step:,} was the last one and no checkpoint is there; the run begins anew.", flush=True)
    return None


def _settle_gpu(config: PretrainConfig) -> PretrainConfig:
    return settle_gpu(config, config.scale.num_workers, "--scale.num_workers")


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
    known = (read_identity(paths.run) or {}).get("corpus_fingerprint", "")
    prepare, manifests = config.prepare, list[Manifest]()
    for length in (config.train.seq_length, config.train.long_seq_length):
        if length:
            pairs = config.objective.next_sentence
            made = prepare_corpus(
                config.corpus, prepare, tokenizer_dir, length, paths.corpora, pairs=pairs, known_fingerprint=known
            )
            manifests.append(made)
            prepare = replace(prepare, held_out_by=made.settings.get("held_out_by", "document"))  # one for all lengths
    return manifests


def _resolve_start(config: PretrainConfig, base_sha256: str, paths: RunPaths) -> tuple[str, CheckpointId | None]:
    """The hash of the tensors that a run starts from, and where they are; of a run with checkpoints the stored hash."""
    stored = read_identity(paths.run)
    if stored is not None and "init_sha256" in stored and find_latest(paths.run / "checkpoints") is not None:
        return str(stored["init_sha256"]), None
    if not Path(config.init_from).expanduser().is_dir():
        raise ConfigError(f"--init_from is {config.init_from!r}, which does not exist; give the directory of a run.")
    found = check_start(Path(config.init_from).expanduser().resolve(), base_sha256)
    return read_tensors_sha256(found), identify_checkpoint(found)


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
    count_planned_words(config, base)  # words that are given are checked
    check_corpus(config.corpus, config.prepare)
    if config.dry_run:
        print(describe_sources(resolve_sources(config.corpus, config.prepare), paths))
        return None
    vocabulary = _provide_extension(config, base, paths.run, paths.corpora)
    if config.vocab.words:
        start_ray()
        measure_extension(config.corpus, config.prepare, vocabulary.folder, paths.corpora)
    print(f"{format_statistics(vocabulary.folder)}\nvocabulary: {vocabulary.folder}")
    return vocabulary


def _provide_extension(config: PretrainConfig, base: Base, folder: Path, cache_dir: Path) -> ExtensionVocabulary:
    """The tokenizer over base and new words, in `folder`."""
    known = _describe_known(config, base)
    if config.vocab.words:
        return import_words(config.vocab, folder=folder, **known)
    start_ray()
    return learn_extension(config.corpus, config.prepare, config.vocab, folder=folder, cache_dir=cache_dir, **known)


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
    check_corpus(config.corpus, config.prepare)
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
        The tokenizer's folder, its words beside the base's, and the prepared corpus.

    Raises:
        DomextError: any mistake of the user's.
    """
    paths = resolve_paths(config)
    tokenizer_dir = _provide_tokenizer(config, _load_base(config), paths)
    return tokenizer_dir, _count_words(tokenizer_dir)[1], _prepare(config, tokenizer_dir, paths)[0]


def count_planned_words(config: PretrainConfig, base: Base | None) -> int:
    """New words that a run will have, as far as options tell: a learned vocabulary may find fewer."""
    if base is None or not config.vocab.words:
        if base is not None and (config.vocab.extend or config.vocab.protected):
            check_given_words(config.vocab, **_describe_known(config, base))
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
        return _provide_extension(config, base, folder, paths.corpora).folder
    tokenizer = load_tokenizer(base.tokenizer_folder)
    with contextlib.suppress(CorpusError):  # one that cannot be loaded is replaced
        if fingerprint_tokenizer(load_tokenizer(folder)) == fingerprint_tokenizer(tokenizer):
            return folder
    with make_folder_anew(folder) as temporary:
        tokenizer.save_pretrained(temporary)
    return folder


def _print_corpus(config: PretrainConfig, manifests: list[Manifest]) -> None:
    num_epochs = 0.0
    for phase in make_phases(config, manifests):
        manifest, plan = phase.manifest, phase.plan
        num_steps = max(0, min(config.train.max_steps, phase.end_step) - phase.first_step)
        num_epochs += num_steps / plan.batches_per_epoch
        print(
            f"corpus: {manifest.num_rows('train'):,} rows of {manifest.seq_length} tokens at most, "
            f"{manifest.num_tokens('train'):,} tokens for training, {manifest.num_rows('held_out'):,} rows held out; "
            f"{plan.batches_per_epoch:,} steps an epoch ({plan.num_dropped_rows} rows of it fill no batch), "
            f"{num_steps / plan.batches_per_epoch:.2f} epochs",
            flush=True,
        )
    if num_epochs < FEW_EPOCHS:
        print(
            f"note: {config.train.max_steps:,} steps read {num_epochs:.1%} of the corpus; --train.max_steps 0 "
            "--train.epochs 1 reads it once.",
            flush=True,
        )
