"""prepare -> pretrain -> export -> report: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, identity.json, tokenizer/,
metrics.jsonl, tensorboard/, checkpoints/, export/, summary.json, curves.png and report.html. The same command goes on
from the newest checkpoint, and says so when there is nothing left to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.config import (
    PretrainConfig,
    describe_difference,
    dump_yaml,
    identity_of,
    resolve_micro_batch_size,
    resolve_warmup_steps,
)
from domext_ray.corpus.extension import (
    ExtensionVocabulary,
    count_brought_words,
    format_statistics,
    import_words,
    learn_extension,
    load_extension,
    measure_extension,
)
from domext_ray.corpus.manifest import SPLITS, Manifest, verify_shards
from domext_ray.corpus.shards import prepare_corpus
from domext_ray.corpus.sources import Sources, resolve_sources
from domext_ray.corpus.vocab import fingerprint_tokenizer, learn_wordpiece, load_tokenizer
from domext_ray.errors import ConfigError, RunError
from domext_ray.export import export_run
from domext_ray.model.base import Base, load_base
from domext_ray.model.graft import ParameterCounts, count_parameters, describe_shape
from domext_ray.report import format_summary, write_report
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.evaluate import read_probe
from domext_ray.training.metrics import read_metrics, write_text
from domext_ray.training.pretrain import PretrainTask, make_phases, pretrain, start_ray
from domext_ray.training.start import check_start

SUBMITTED_RUNS = Path("~/domext_runs")
LISTED_FILES = 20


@dataclass(frozen=True)
class RunPaths:
    """Places of one run.

    Args:
        run: the run's directory.
        corpora: folder of prepared corpora, shared by the runs beside it.
    """

    run: Path
    corpora: Path


def resolve_paths(config: PretrainConfig) -> RunPaths:
    """Say where a run lives.

    A submitted job (`ray job submit`) runs in a copy of the working directory that a resubmission does not find
    again, so there a relative --run.dir stands below ~/domext_runs.
    """
    root = Path(config.run.dir).expanduser()
    if not root.is_absolute() and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        root = SUBMITTED_RUNS.expanduser() / ("" if config.run.dir == "runs" else root)
    root = root.resolve()
    cache = Path(config.prepare.cache_dir).expanduser().resolve() if config.prepare.cache_dir else root / ".corpora"
    return RunPaths(root / (config.run.name or config.method.name), cache)


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
    config = resolve_schedule(config, paths.run)
    base = _load_base(config)
    read_probe(config.train.general_probe)
    identity = {**identity_of(config), "base_sha256": base.sha256 if base else "none"}
    if config.init_from:
        identity["init_sha256"] = _resolve_start(config, identity["base_sha256"], paths)
    check_identity(paths.run, identity)
    if config.dry_run:
        resolve_sources(config.corpus, config.prepare)
        num_new_words = _count_planned_words(config, base)
        print(describe_plan(config, paths, _count_parameters(config, base, config.vocab.size, num_new_words)))
    elif _is_finished(paths.run, config):
        print(
            f"the run in {paths.run} has reached its limit; nothing is left to do (a larger --train.max_steps, "
            "max_tokens or max_seconds goes on, another --run.name starts anew)."
        )
    else:
        print(f"run directory: {paths.run}", flush=True)
        with hold_run(paths.run):
            _train(config, base, paths, identity)
    return paths.run


def _train(config: PretrainConfig, base: Base | None, paths: RunPaths, identity: dict[str, Any]) -> None:
    """Prepare, train, export and report, in a run's directory that this job holds."""
    start_ray()
    tokenizer_dir = _provide_tokenizer(config, base, paths)
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
    pretrain(PretrainTask(config, paths.run, folders, tokenizer_dir, identity["base_sha256"], start))
    vocab_size, num_new_words = _count_words(tokenizer_dir)
    counts = _count_parameters(config, base, vocab_size, num_new_words)
    summary = write_summary(paths.run, config, counts, manifests[0])
    export_run(paths.run, paths.run / "export")
    page = write_report(paths.run)
    print(format_summary(summary))
    print(f"export: {paths.run / 'export'}\nreport: {page}")


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
    stored = _read_identity(paths.run)
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
        _count_planned_words(config, base)  # brought words are checked
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


def _count_planned_words(config: PretrainConfig, base: Base | None) -> int:
    """New words that a run will have, as far as options tell: a learned vocabulary may find fewer."""
    if base is None or not config.vocab.words:
        return 0 if base is None else config.vocab.size
    return count_brought_words(config.vocab, **_describe_known(config, base))


def describe_sources(sources: Sources, paths: RunPaths) -> str:
    """Return what a dry run of the preparation prints: the files and their size."""
    files = {file.path: file.size for task in sources.tasks for file in task.files}
    lines = [f"  {size / 1e6:>12,.2f} MB  {path}" for path, size in list(files.items())[:LISTED_FILES]]
    if len(files) > LISTED_FILES:
        lines.append(f"  … and {len(files) - LISTED_FILES:,} more")
    return "\n".join(
        [
            f"corpus: {len(files):,} files, {sources.num_bytes / 1e6:,.2f} MB, {len(sources.tasks):,} read tasks",
            *lines,
            f"folder of prepared corpora: {paths.corpora}",
            "dry run: nothing was started",
        ]
    )


def describe_manifest(manifest: Manifest) -> str:
    """Return the table of a prepared corpus: rows and tokens by split, documents, what was dropped and why."""
    lines = [f"{'split':<10}{'shards':>8}{'rows':>14}{'tokens':>16}"]
    for split in SPLITS:
        records, num_rows, num_tokens = manifest.records(split), manifest.num_rows(split), manifest.num_tokens(split)
        lines.append(f"{split:<10}{len(records):>8,}{num_rows:>14,}{num_tokens:>16,}")
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(manifest.dropped.items()))
    lines += [f"documents: {manifest.num_documents:,}", f"dropped: {dropped or 'none'}", f"folder: {manifest.folder}"]
    return "\n".join(lines)


def resolve_schedule(config: PretrainConfig, run_dir: Path) -> PretrainConfig:
    """Fix the schedule's horizon: the option's, or the one that the run started with, or its first limit."""
    decay_steps = config.optim.decay_steps
    stored = _read_identity(run_dir)
    if not decay_steps:
        decay_steps = stored["optim"]["decay_steps"] if stored else config.train.max_steps
    is_limited = config.train.max_tokens or config.train.max_seconds
    if config.train.max_steps > decay_steps and not is_limited:
        print(
            f"warning: the schedule ends at step {decay_steps:,} (--optim.decay_steps); later steps train at rate 0.",
            flush=True,
        )
    resolved = replace(config, optim=replace(config.optim, decay_steps=decay_steps))
    return replace(
        resolved,
        optim=replace(resolved.optim, warmup_steps=resolve_warmup_steps(resolved)),
    )


def check_identity(run_dir: Path, identity: dict[str, Any]) -> None:
    """Refuse a run directory that was made by a run of another identity.

    Raises:
        RunError: naming every option that differs.
    """
    stored = _read_identity(run_dir)
    if stored is None:
        return
    differing = describe_difference({name: stored.get(name) for name in identity}, identity)
    if differing:
        raise RunError(
            f"the run directory {run_dir} belongs to another run ({'; '.join(differing)}); "
            "give another --run.name, or the options that it was made with."
        )


def _read_identity(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "identity.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is not valid JSON; delete the run directory or give another --run.name.") from error


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Make a run's directory and hold it against a second job; a killed job lets go by itself.

    A mistake that shows before the run has an identity (an empty corpus, say) leaves no new directory behind.

    Raises:
        RunError: another job holds it, or it cannot be made.
    """
    made = [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("a")
    except OSError as error:
        raise RunError(
            f"the run directory {run_dir} cannot be made ({error.strerror}); give another --run.dir."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"another job is working in {run_dir}; wait for it, stop it, or give another --run.name."
            ) from error
        try:
            yield
        except BaseException:
            if made and not (run_dir / "identity.json").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                for each in made[1:]:
                    with contextlib.suppress(OSError):  # others may have put something there
                        each.rmdir()
            raise


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
    _count_parameters(config, base, base.config.vocab_size, 0)  # the method fits the shape
    return base


def _count_words(tokenizer_dir: Path) -> tuple[int, int]:
    """Words of the base, and new ones, in a run's tokenizer."""
    extension = load_extension(tokenizer_dir)
    num_new = 0 if extension is None else len(extension.words)
    return len(load_tokenizer(tokenizer_dir)) - num_new, num_new


def _count_parameters(
    config: PretrainConfig, base: Base | None, vocab_size: int, num_new_words: int
) -> ParameterCounts:
    next_sentence = config.objective.next_sentence
    shape = describe_shape(
        base,
        config.shape,
        config.method,
        vocab_size=vocab_size,
        num_new_words=num_new_words,
        next_sentence=next_sentence,
    )
    return count_parameters(shape, config.method, base.heads if base else (), next_sentence=next_sentence)


def _is_finished(run_dir: Path, config: PretrainConfig) -> bool:
    summary = run_dir / "summary.json"
    if not (summary.exists() and (run_dir / "report.html").exists() and (run_dir / "export").exists()):
        return False
    done, limits = json.loads(summary.read_text(encoding="utf-8"))["train"], config.train
    return (
        done["steps"] >= limits.max_steps
        or 0 < limits.max_tokens <= done["tokens"]
        or 0 < limits.max_seconds <= done["wall_seconds"]
    )


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


def describe_plan(config: PretrainConfig, paths: RunPaths, counts: ParameterCounts) -> str:
    """Return what a dry run prints: the resolved configuration, parameter counts and memory per rank."""
    memory = estimate_memory(config, counts)
    parts = "\n".join(f"  {name.replace('_', ' '):<22}{value / 2**20:>10,.1f} MiB" for name, value in memory.items())
    return (
        f"{dump_yaml(config)}\nrun directory: {paths.run}\n"
        f"parameters: {counts.total:,} in all, {counts.trainable:,} trainable "
        f"({counts.trainable_frac:.2%} of base + extension)\n"
        f"memory per rank, estimated:\n{parts}\n  {'sum':<22}{sum(memory.values()) / 2**20:>10,.1f} MiB\n"
        "dry run: nothing was started"
    )


def estimate_memory(config: PretrainConfig, counts: ParameterCounts) -> dict[str, int]:
    """Estimate bytes of one rank: weights, gradients and moments by ZeRO stage, activations of a micro batch.

    Activations count the tensors that the backward pass of a BERT layer keeps: about 34 hidden-size vectors a token
    and layer at two bytes (Korthikanti et al. 2022, without attention scores, which fused attention never keeps).
    """
    stage, world = config.engine.zero_stage, config.scale.num_workers
    wide = config.engine.base_dtype == "fp32" or (config.engine.base_dtype == "auto" and not config.scale.use_gpu)
    frozen = (counts.total - counts.trainable) * (4 if wide else 2)
    weights = counts.trainable * 4
    tokens = resolve_micro_batch_size(config) * config.train.seq_length
    bytes_per_value = 2 if config.engine.precision == "bf16" else 4
    layers = 1 if config.engine.activation_checkpointing else counts.num_hidden_layers
    moments = weights * 2 // (world if stage >= 1 else 1)
    return {
        "frozen_weights": frozen // (world if stage == 3 else 1),
        "trainable_weights": weights // (world if stage == 3 else 1),
        "gradients": weights // (world if stage >= 2 else 1),
        "optimizer_moments": 0 if config.engine.offload else moments,
        "activations": tokens * counts.hidden_size * layers * 17 * bytes_per_value,
    }


def write_summary(run_dir: Path, config: PretrainConfig, counts: ParameterCounts, manifest: Manifest) -> dict[str, Any]:
    """Write summary.json from the metrics of a run and return it."""
    records = read_metrics(run_dir / "metrics.jsonl")
    steps = [each for each in records if "train/mlm_loss" in each]
    evaluated = [each for each in records if "eval/domain_mlm_loss" in each]
    if not steps or find_latest(run_dir / "checkpoints") is None:
        raise RunError(f"{run_dir} has no trained step to summarise; run the job again.")
    before, after, last = evaluated[0], evaluated[-1], steps[-1]
    seconds = last["time/seconds"]
    summary = {
        "parameters": {
            "total": counts.total,
            "trainable": counts.trainable,
            "trainable_frac": counts.trainable_frac,
        },
        "domain": {
            name: {"before": before[f"eval/domain_{name}"], "after": after[f"eval/domain_{name}"]}
            for name in ("mlm_loss", "mlm_accuracy", "bits_per_character")
        },
        "general": {
            "mlm_accuracy": {
                "before": before["eval/general_mlm_accuracy"],
                "after": after["eval/general_mlm_accuracy"],
            }
        },
        "train": {
            "steps": last["step"],
            "tokens": last["train/tokens"],
            "tokens_per_second": last["train/tokens"] / seconds,
            "data_wait_frac": sum(each["data/wait_seconds"] for each in steps) / seconds,
            "wall_seconds": seconds,
        },
        "corpus": {
            "rows": manifest.num_rows("train"),
            "tokens": manifest.num_tokens("train"),
            "dropped": manifest.dropped,
        },
        "evaluation": {
            "domain_tokens": after["eval/domain_tokens"],
            "domain_characters": after["eval/domain_characters"],
            "general_words": after["eval/general_words"],
        },
        "method": asdict(config.method),
        "base": config.base,
    }
    write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary
