"""A run's tokenizer and its prepared corpora: made where they are not there yet, found where they are.

Enters: a configuration and its base. Leaves: RUN.DIR/RUN.NAME/tokenizer, and prepared corpora in the folder that all
runs share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, RunOptions, SettledConfig
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.model.base import Base
from domext_ray.model.budget import TOLERANCE
from domext_ray.model.spec import ModelSpec
from domext_ray.pretraining.plan import count_planned_words, load_run_base, pin_corpus, warn_of_rules
from domext_ray.runs.run_directory import (
    RUN,
    RunPaths,
    check_identity,
    read_identity,
    resolve_paths,
    resolve_schedule,
)
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.storage import Place
from domext_ray.text.corpus.estimate import require_both_splits
from domext_ray.text.corpus.manifest import SPLITS, Manifest
from domext_ray.text.corpus.overlap import find_overlaps, read_hashes
from domext_ray.text.corpus.shards import make_settings, prepare_corpus
from domext_ray.text.corpus.unknown import (
    check_sample,
    count_sample,
    describe_unknown,
    find_unknown,
    warn_of_split_words,
)
from domext_ray.text.data.files import LOCAL
from domext_ray.text.data.folders import say
from domext_ray.text.data.sample import Sample, check_corpus, tell_owners
from domext_ray.text.data.sources import require_files, resolve_sources
from domext_ray.text.vocabulary.extension import (
    ExtensionVocabulary,
    extend_tokenizer,
    load_extension,
)
from domext_ray.text.vocabulary.learn import (
    import_words,
    learn_extension,
    learn_wordpiece,
    measure_extension,
    read_given,
)
from domext_ray.text.vocabulary.statistics import format_statistics
from domext_ray.text.vocabulary.tokenizer import (
    LAST_FILE,
    fingerprint_tokenizer,
    load_tokenizer,
    replace_folder,
)
from domext_ray.training.checkpoint import Checkpoint
from domext_ray.training.evaluate import read_probe
from domext_ray.training.losses import needs_teacher
from domext_ray.training.phases import resolve_max_steps
from domext_ray.training.run import Inputs, Plan, Run, name_fingerprints
from domext_ray.training.start import check_vocabulary
from domext_ray.training.writing import get_or_write_text, prepare_written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_WORDS = 10


def check_texts(config: RunOptions, base: Base | None) -> list[Sample | None]:
    """Read and return a sample of each of a run's texts, before Ray starts; None: the base is going to write it.

    A text that the run's tokenizer, as far as it is known, does not know is a CorpusError, too.
    """
    samples, tokenizer = list[Sample | None](), _plan_tokenizer(config, base)
    is_begun = (resolve_paths(config).run / RUN).exists()
    for part in config.texts:
        if part.is_written:
            samples.append(None)
            continue
        try:
            sample = check_corpus(part.corpus, config.prepare_for(part), to_end=bool(config.dry_run))
            samples.append(sample)
            tell_owners(sample, config, part, is_begun=is_begun)
            require_both_splits(sample)
            if tokenizer is not None:
                settings = make_settings(tokenizer, sample.prepare, config.train.seq_length)
                check_sample(sample, settings, warns=bool(config.dry_run))
                if not part.keep:
                    warn_of_split_words(sample, tokenizer, read_probe())
        except CorpusError as error:
            raise CorpusError(str(error).replace("--corpus", part.option)) from error
    _tell_shared_files(config, samples)
    return samples


def _tell_shared_files(config: RunOptions, samples: Sequence[Sample | None]) -> None:
    """Say which file two texts of a run have, before anything is read: what else they share is told once it is."""
    readers: dict[str, str] = {}
    for part, sample in zip(config.texts, samples, strict=True):
        for file in sample.files if sample else ():
            place = os.path.realpath(file.path) if file.scheme in LOCAL else file.address
            other = readers.setdefault(place, part.option)
            if other != part.option:
                say(f"{part.option} reads {file.address}, which {other} reads, too")
                break


def _plan_tokenizer(config: RunOptions, base: Base | None) -> PreTrainedTokenizerBase | None:
    """The run's tokenizer; None: it is still to be learned, or words of it are."""
    if base is None or config.vocab.size:
        return None
    if not config.vocab.words:
        return base.tokenizer
    return extend_tokenizer(base.vocabulary, read_given(config.vocab, base.vocabulary))


def prepare_run(plan: Plan, goes_on_from: Checkpoint | None = None) -> Run:
    """Provide a run's tokenizer and corpora, and settle what depends on them; the run is held, Ray initialised."""
    config, base, paths = plan.config, plan.spec.base, plan.paths
    require_same_texts(config, paths)
    tokenizer_dir = get_or_build_tokenizer(config, base, paths)
    spec = plan.spec.with_tokenizer(tokenizer_dir)
    _check_budget(config, spec)
    if plan.start is not None and goes_on_from is None:
        check_vocabulary(plan.start, tokenizer_dir)
    inputs = get_or_prepare_texts(config, base, tokenizer_dir, paths)
    inputs = replace(inputs, tokenizer=paths.run / "tokenizer")  # which workers on all nodes see
    if config.train.epochs or not config.train.max_steps:
        config = resolve_schedule(resolve_max_steps(config, [own for own, *_ in inputs.texts]), paths.run)
    run = Run(config, paths, spec, plan.start, plan.preset, inputs=inputs, goes_on_from=goes_on_from)
    check_identity(paths.run, run.identity)
    return run


def _check_budget(config: SettledConfig, spec: ModelSpec) -> None:
    """Refuse a budget that was solved for a vocabulary of another size than the text gave."""
    budget, num_new_words = config.method.trainable_budget, len(spec.new_words)
    if budget and abs(spec.counts.trainable_frac - budget) > TOLERANCE * budget:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size} and the text gave {num_new_words}, so that the method trains "
            f"{spec.counts.trainable_frac:.2%} instead of --method.trainable_budget {budget:g}; give --vocab.size "
            f"{num_new_words}."
        )


def require_same_texts(config: SettledConfig, paths: RunPaths) -> None:
    """Refuse a run whose texts are not those that it began with, before anything is made of them."""
    identity = read_identity(paths.run) or {}
    for text, name in zip(config.texts, name_fingerprints(config), strict=True):
        if not text.is_written and name in identity:
            prepare = config.prepare_for(text)
            require_same_text(
                paths, str(identity[name]), text.corpus, prepare, f"the run directory {paths.run}", text.option
            )


def require_same_text(
    paths: RunPaths, fingerprint: str, spec: str, prepare: PrepareConfig, what: str, option: str = "--corpus"
) -> None:
    """Refuse a text that is not the one of a prepared corpus, as far as this is there.

    `fingerprint` is the prepared corpus's; `what` was made with it, and begins the error's sentence.
    """
    require_files(
        paths.corpora / fingerprint[:16],
        lambda: resolve_sources(spec, prepare, paths.corpora).record(),
        f"so that {option} {spec!r} is not the text that {what} was made with; bring that back, or give another "
        "--run.name",
    )


def get_or_prepare_inputs(config: PretrainConfig, base: Base | None, paths: RunPaths) -> Inputs:
    """Make a run's tokenizer and its corpora, or take what was made before; Ray is initialised."""
    config = pin_corpus(config, read_identity(paths.run) or {})
    return get_or_prepare_texts(config, base, get_or_build_tokenizer(config, base, paths), paths)


def get_or_prepare_texts(config: RunOptions, base: Base | None, tokenizer_dir: Path, paths: RunPaths) -> Inputs:
    """Prepare a run's texts for every length phase, or find them prepared; Ray is initialised."""
    general: Place | None = None
    if base is not None and needs_teacher(config) and config.vocab.extends_base:  # which the base could not read
        general = _copy_tokenizer(base, paths.run / "replay_tokenizer")
    sources = list[tuple[str, PrepareConfig, Path]]()
    for text in config.texts:
        corpus, prepare = text.corpus, config.prepare_for(text)
        if text.is_written:
            assert base is not None, "PretrainConfig refuses none"
            corpus, prepare = str(get_or_write_text(base, paths.corpora)), prepare_written(config.prepare)
        sources.append((corpus, prepare, general.local() if general and text.keep else tokenizer_dir))
    if base is not None and _plan_tokenizer(config, base) is None:  # words are learned: `check_texts` came before
        for corpus, prepare, folder in sources:
            settings = make_settings(load_tokenizer(folder), prepare, config.train.seq_length)
            check_sample(check_corpus(corpus, prepare), settings)
    pairs = config.objective.next_sentence
    texts = tuple(
        tuple(prepare_corpus(*source, length, paths.corpora, pairs=pairs) for source in sources)
        for length in config.train.lengths
    )
    overlaps = list[str]()
    own = [manifest for text, manifest in zip(config.texts, texts[0], strict=True) if not (general and text.keep)]
    _tell_unused(tokenizer_dir, own)
    if config.parts:
        named = zip(config.texts, texts[0], strict=True)
        overlaps = find_overlaps([(text.option, read_hashes(manifest.folder)) for text, manifest in named])
        for overlap in overlaps:
            print(f"{overlap}.", flush=True)
    return Inputs(Place(tokenizer_dir), texts, general, tuple(overlaps))


def _tell_unused(tokenizer_dir: Path, texts: Sequence[Manifest]) -> None:
    """Say how many of a run's new words no training row has: those learn nothing."""
    extension = load_extension(tokenizer_dir)
    if extension is None:
        return
    num_words = extension.first_id + len(extension.words)
    counts = np.sum([manifest.token_counts(num_words)[extension.first_id :] for manifest in texts], axis=0)
    unused = [extension.words[i] for i in np.flatnonzero(counts == 0)]
    if unused:
        shown = ", ".join(unused[:SHOWN_WORDS]) + ", …" * (len(unused) > SHOWN_WORDS)
        print(
            f"note: {len(unused):,} of {len(extension.words):,} new words are in no training row and learn nothing: "
            f"{shown}.",
            flush=True,
        )


def run_vocabulary(config: PretrainConfig) -> ExtensionVocabulary | None:
    """Learn an extension vocabulary, or take one's own words, into RUN.DIR/RUN.NAME; None after a dry run."""
    paths = resolve_paths(config)
    base = load_run_base(config)
    if base is None or not config.vocab.extends_base:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size}; give the number of new words (for example 5000), or --vocab.words, "
            "and a --base that they stand beside."
        )
    count_planned_words(config, base)  # words that are given are checked
    warn_of_rules(base)
    samples = [check_corpus(config.corpus, config.prepare)]
    tell_owners(samples[0], config, config.texts[0])
    if config.dry_run:
        print(_describe_sources(config, base, samples, paths))
        return None
    vocabulary = _provide_extension(config, base, paths.scratch, paths.corpora)
    if config.vocab.words:
        start_ray(config.scale.wait_seconds)
        measure_extension(config.corpus, config.prepare, config.vocab, vocabulary, paths.corpora)
    _keep(vocabulary.folder, paths.run)
    print(f"{format_statistics(Place(vocabulary.folder))}\nvocabulary: {paths.run}")
    return vocabulary


def _provide_extension(config: RunOptions, base: Base, folder: Path, cache_dir: Place) -> ExtensionVocabulary:
    """The tokenizer over base and new words, in `folder`."""
    if config.vocab.words:
        return import_words(config.vocab, base.vocabulary, folder)
    start_ray(config.scale.wait_seconds)
    return learn_extension(config.corpus, config.prepare, config.vocab, base.vocabulary, folder, cache_dir)


def run_preparation(config: PretrainConfig) -> Manifest | None:
    """Prepare a corpus where a run of the same options will look for it, and return it; None after a dry run."""
    paths = resolve_paths(config)
    config = pin_corpus(config, read_identity(paths.run) or {})
    base = load_run_base(config)
    count_planned_words(config, base)  # words that are given are checked
    warn_of_rules(base)
    samples = check_texts(config, base)
    if config.dry_run:
        print(_describe_sources(config, base, samples, paths))
        return None
    start_ray(config.scale.wait_seconds)
    is_own = base is not None and not config.vocab.extends_base
    tokenizer_dir = base.folder if base and is_own else get_or_build_tokenizer(config, base, paths)
    inputs = get_or_prepare_texts(config, base, tokenizer_dir, paths)
    for own in zip(*inputs.texts, strict=True):
        print("\n".join(_describe_manifest(manifest, config.prepare) for manifest in own))
    return inputs.domain


def _describe_sources(config: RunOptions, base: Base | None, samples: Sequence[Sample | None], paths: RunPaths) -> str:
    """Return what a dry run of the preparation prints: the files, their size, and what of them is unknown."""
    sources, known = resolve_sources(config.corpus, config.prepare), []
    files = sources.files
    lines = [f"  {file.size / 1e6:>12,.2f} MB  {file.path}" for file in files[:20]]
    if len(files) > 20:
        lines.append(f"  … and {len(files) - 20:,} more")
    if base is not None:
        tokenizer = _plan_tokenizer(config, base)
        owner = "the tokenizer" if tokenizer is not None else "the base's tokenizer, without new words"
        settings = make_settings(tokenizer or base.tokenizer, config.prepare, 0)
        for text, sample in zip(config.texts, samples, strict=False):
            if sample is not None:
                found = find_unknown(count_sample(sample, settings)[0].pack(), sample.prepare)
                known.append(f"unknown to {owner} in a sample of {text.option}: {describe_unknown(found)}")
    return "\n".join(
        [
            f"corpus: {len(files):,} files, {sources.num_bytes / 1e6:,.2f} MB, {len(sources.tasks):,} read tasks",
            *lines,
            *known,
            f"folder of prepared corpora: {paths.corpora}",
            "dry run: nothing was started",
        ]
    )


def _describe_manifest(manifest: Manifest, prepare: PrepareConfig) -> str:
    """Return the table of a prepared corpus: rows and tokens by split, documents, what was dropped, what is unknown."""
    lines = [f"{'split':<10}{'shards':>8}{'rows':>14}{'tokens':>16}"]
    for split in SPLITS:
        records, num_rows, num_tokens = manifest.records(split), manifest.num_rows(split), manifest.num_tokens(split)
        lines.append(f"{split:<10}{len(records):>8,}{num_rows:>14,}{num_tokens:>16,}")
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(manifest.dropped.items()))
    lines += [f"documents: {manifest.num_documents:,}", f"dropped: {dropped or 'none'}"]
    if unknown := describe_unknown(find_unknown(manifest.unknown, prepare)):
        lines.append(f"unknown to the tokenizer: {unknown}")
    lines.append(f"folder: {manifest.folder}")
    return "\n".join(lines)


def get_or_build_tokenizer(config: RunOptions, base: Base | None, paths: RunPaths) -> Path:
    """The run's tokenizer, in the run's directory: the base's own, with new words or without, or a learned one.

    Of a run in a bucket there is one in the run and one at a local path, which is returned.
    """
    folder, kept = paths.scratch / "tokenizer", paths.run / "tokenizer"
    is_kept = not kept.is_local and (kept / LAST_FILE).is_file()
    if is_kept:
        shutil.copytree(kept.local(), folder, dirs_exist_ok=True)
    if base is None:
        longest = config.shape.max_position_embeddings
        learn_wordpiece(config.corpus, config.prepare, config.vocab, folder, longest, paths.corpora)
    elif config.vocab.extends_base:
        _provide_extension(config, base, folder, paths.corpora)
    else:
        _copy_tokenizer(base, Place(folder))
    if not is_kept:
        _keep(folder, kept)
    return folder


def _keep(folder: Path, place: Place) -> None:
    """Keep a vocabulary that was made at a local path in the bucket that it is for, if it is for one."""
    if not place.is_local:
        with replace_folder(place) as temporary:
            shutil.copytree(folder, temporary, dirs_exist_ok=True)


def _copy_tokenizer(base: Base, folder: Place) -> Place:
    """The base's tokenizer in a folder of the run's, which all nodes see."""
    with contextlib.suppress(CorpusError, FileNotFoundError):  # one that cannot be loaded is replaced
        if fingerprint_tokenizer(load_tokenizer(folder.local())) == fingerprint_tokenizer(base.tokenizer):
            return folder
    with replace_folder(folder) as temporary:
        base.tokenizer.save_pretrained(temporary)
    return folder
