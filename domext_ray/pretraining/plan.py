"""A run's plan: everything that can be known, and refused, before its texts are prepared; and how far it has come.

Enters: a `PretrainConfig`. Leaves: a `Plan`. Until `begin` nothing is started, and in the run's directory nothing is
written but where the base and the text of a run that has ended are now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.config.pretrain import OptimConfig, PretrainConfig, RunOptions, SettledConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.export.folder import HUGGINGFACE, check_target, read_export_record
from domext_ray.model.base import Base, load_base
from domext_ray.model.build import Extensions
from domext_ray.model.spec import ModelSpec
from domext_ray.report.summary import read_summary
from domext_ray.runs.events import PREPARING, START_UP, enter_phase
from domext_ray.runs.run_directory import (
    RunPaths,
    check_identity,
    check_order,
    describe_continuation,
    keep_precision,
    lock_run,
    read_config,
    read_identity,
    resolve_paths,
    resolve_schedule,
    write_config,
)
from domext_ray.runtime.ray_cluster import resolve_gpu, resolve_precision, start_ray
from domext_ray.storage import Place, hash_values
from domext_ray.text.corpus.shards import identify_corpus
from domext_ray.text.data.files import pin_entries
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.text.data.package_docs import count_wanted
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary.learn import count_new_words
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.checkpoint import Checkpoint, choose_checkpoint, find_latest, list_steps
from domext_ray.training.elastic import check_room
from domext_ray.training.evaluate import read_probe
from domext_ray.training.metrics import find_last_step
from domext_ray.training.phases import ADDED_TO_ORDER, ORDER
from domext_ray.training.run import Plan
from domext_ray.training.start import find_start

ConfigT = TypeVar("ConfigT", bound=RunOptions)


def resolve(asked: PretrainConfig, preset: str = "") -> Plan:
    """Check a run and settle all that its options leave open; one that goes on keeps what it began with."""
    paths = resolve_paths(asked)
    stored = read_identity(paths.run) or {}
    config = resolve_files(resolve_workers(keep_precision(SettledConfig.of(asked), paths.run)))
    config = pin_corpus(resolve_schedule(config, paths.run), stored)
    base = load_run_base(config)
    read_probe(config.train.general_probe)
    start = find_start(config, base, paths.run, stored) if config.init_from else None
    spec = size_model(config, base, start.checkpoint.extensions if start else None)
    config = replace(config, method=spec.method)
    plan = Plan(config, paths, spec, start, preset)
    check_identity(paths.run, {**plan.identity, **_find_moved_corpus(config, paths, stored)})
    return plan


def is_finished(run_dir: Place, config: RunOptions) -> bool:
    """Whether a run has reached one of its limits, and all that it leaves is there and of its newest checkpoint."""
    if not all((run_dir / name).is_file() for name in ("summary.json", "report.html")):
        return False
    try:
        read_config(run_dir, SettledConfig)
    except RunError:  # going on writes it anew
        return False
    done, train = read_summary(run_dir / "summary.json")["train"], config.train
    limits = [(train.max_steps, "steps"), (train.max_tokens, "tokens"), (train.max_seconds, "wall_seconds")]
    record, step = read_export_record(run_dir / "export"), done["steps"]  # an export is what a job writes last
    newest = max(list_steps(run_dir / "checkpoints"), default=step)  # none: they were deleted to save space
    if record is None or not newest == record.step == step:
        return False
    saved = find_latest(run_dir / "checkpoints", step, hashes=False)
    if saved is not None and saved.tensors_sha256 != record.checkpoint_sha256:
        return False
    return any(0 < limit <= done[name] for limit, name in limits)


def tell_if_finished(run_dir: Place, config: SettledConfig) -> bool:
    """Whether a run is finished; if it is, say so, and how it could go on.

    Where the base and the text are now is kept then: an export reads the base again.
    """
    if not is_finished(run_dir, config):
        return False
    stored = read_config(run_dir, SettledConfig)
    moved = replace(stored, base=config.base, corpus=config.corpus, init_from=config.init_from)
    if moved != stored:
        with contextlib.nullcontext(run_dir) if run_dir.fence else lock_run(run_dir) as held:
            write_config(held, moved)
    steps, horizon = read_summary(run_dir / "summary.json")["train"]["steps"], config.optim.decay_steps
    more = f"a larger --train.max_steps, max_tokens or max_seconds goes on, up to step {horizon:,}"
    more = more if steps < horizon else describe_continuation(config, run_dir)
    print(
        f"the run in {run_dir} has reached its limit; nothing is left to do ({more}; another --run.name starts anew)."
    )
    return True


@contextlib.contextmanager
def begin(plan: Plan, started: float) -> Iterator[Plan]:
    """Hold a run's directory, start Ray, and settle what is known only with it: what the machines of a cluster are."""
    with lock_run(plan.paths.run) as held:  # before Ray starts: storage that refuses is told within seconds
        start_ray(plan.config.scale.wait_seconds)
        config = resolve_workers(plan.config)
        check_room(config.scale)
        print(f"run directory: {held}", flush=True)
        if not held.is_local:
            print(f"prepared corpora: {plan.paths.corpora}", flush=True)
        check_target(held / "export", HUGGINGFACE)
        enter_phase(held, "starting the job", START_UP, started)
        enter_phase(held, "preparing the text", PREPARING)
        yield replace(plan, config=config, paths=replace(plan.paths, run=held))


def look_back(run_dir: Place) -> Checkpoint | None:
    """Choose the checkpoint that a run goes on from, and say what has changed since; None: it begins anew."""
    for changed in check_order(run_dir, ORDER, ADDED_TO_ORDER):
        print(f"note: {changed}.", flush=True)
    found = choose_checkpoint(run_dir / "checkpoints", tell=lambda sentence: print(f"warning: {sentence}", flush=True))
    if found is None and (step := find_last_step(run_dir / "metrics.jsonl")):
        print(f"note: step {step:,} was the last one and no checkpoint is there; the run begins anew.", flush=True)
    return found


def tell_of_base(config: RunOptions, base: Base | None) -> None:
    """Say what a run's user should know of its base: once it is sure that there is work, and nothing is refused."""
    if base is None:
        return
    warn_of_rules(base)
    warn_of_rate(config.optim, base, "--optim.lr")
    if config.objective.reads_words and not base.has_mlm_head:
        print(f"note: the base {config.base!r} has no masked-LM head: a fresh one is made and trains.", flush=True)


def warn_of_rules(base: Base | None) -> None:
    """Say so where the rules of a base's tokenizer do not fit its entries."""
    if base is not None and base.wrong_rules:
        print(f"warning: {base.wrong_rules}", flush=True)


def warn_of_rate(optim: OptimConfig, base: Base, option: str) -> None:
    """Say so where a preset's rate was chosen for bases of another size; `option` is the one that gives another."""
    width = base.config.hidden_size
    if optim.lr_width and not optim.lr_width / 2 < width < optim.lr_width * 2:
        print(
            f"warning: the preset has rates for bases of width {optim.lr_width}, and {base.id!r} has {width}; give "
            f"{option}, or a preset for bases of that width (domext presets lists them).",
            flush=True,
        )


def resolve_files(config: ConfigT) -> ConfigT:
    """Make the paths absolute that workers read: they run in folders of their own."""
    base, probe = Path(config.base).expanduser(), config.train.general_probe
    if config.base != SHIPPED_BASE and base.is_dir():
        config = replace(config, base=str(base.resolve()))
    if probe:
        config = replace(config, train=replace(config.train, general_probe=str(Path(probe).expanduser().resolve())))
    return config


def pin_corpus(config: ConfigT, stored: Mapping[str, Any]) -> ConfigT:
    """Name in a run's texts what may change, so that it reads the same ones on every node and when it goes on.

    `stored` is the identity that the run began with, empty at first.
    """
    corpus = pin_entries(config.corpus, stored.get("corpus", ""), count_wanted(config))
    return replace(pin_other_texts(config, stored), corpus=corpus)


def pin_other_texts(config: ConfigT, stored: Mapping[str, Any]) -> ConfigT:
    """Pin the general text and those of a mixture as `pin_corpus` does."""
    parts = dict[str, Any]()
    known = stored.get("mixture", {}).get("parts", {})
    for name, part in config.mixture.parts.items():
        parts[name] = {**part, "corpus": pin_entries(part["corpus"], known.get(name, {}).get("corpus", ""), None)}
    before = stored.get("replay", {}).get("corpus", "") or stored.get("replay.corpus", "")  # this of a study
    general = replace(config.replay, corpus=pin_entries(config.replay.corpus, before, None))
    return replace(config, replay=general, mixture=replace(config.mixture, parts=parts))


def resolve_workers(config: ConfigT) -> ConfigT:
    """Settle `--scale.use_gpu auto` and `--engine.precision auto` once it is known; before Ray starts it may not be."""
    return resolve_precision(resolve_gpu(config, config.scale.least_workers, "--scale.num_workers"))


def load_run_base(config: RunOptions) -> Base | None:
    """Load a run's base, None for random weights, and refuse options that do not fit it."""
    if config.base == "none":
        return None
    base = load_base(config.base, next_sentence=config.objective.next_sentence)
    config.check_lengths(base.config.max_row_length)
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


def size_model(config: RunOptions, base: Base | None, earlier: Extensions | None = None) -> ModelSpec:
    """Return a run's model, with the sizes that its method's trainable budget asks for.

    `earlier` are extensions that the model has beside the method's own.
    """
    return ModelSpec.of(config, base, earlier, count_planned_words(config, base)).solve()


def count_planned_words(config: RunOptions, base: Base | None) -> int:
    """New words that a run will have, as far as options tell: a learned vocabulary may find fewer."""
    if base is None or not config.vocab.extends_base:
        return 0
    return count_new_words(config.vocab, base.vocabulary)


def _find_moved_corpus(config: SettledConfig, paths: RunPaths, stored: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint that a run's corpus has under another name; nothing where it is called as before or is another.

    It is known before the corpus is prepared: the run has its tokenizer already.
    """
    if stored.get("corpus", config.corpus) == config.corpus or not (paths.run / "tokenizer").is_dir():
        return {}
    sources = resolve_sources(config.corpus, config.prepare, paths.corpora)
    tokenizer = load_tokenizer((paths.run / "tokenizer").local())
    pairs = config.objective.next_sentence
    identity = identify_corpus(sources, config.prepare, tokenizer, config.train.seq_length, pairs)
    found = [
        hash_values({**identity, "content": content}) for content in (sources.fingerprint, sources.former_fingerprint)
    ]
    return {"corpus_fingerprint": stored["corpus_fingerprint"]} if stored.get("corpus_fingerprint") in found else {}
