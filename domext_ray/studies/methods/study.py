"""Several methods at equal trainable budgets and for an equal time, several seeds each: what `domext compare` calls.

Enters: a `StudyConfig`. Leaves: the study directory RUN.DIR/RUN.NAME with a run directory for
every method, budget and seed, comparison.md, comparison.png and results.json. The same command goes on where it
stopped.

Every run ends at rate 0 when its seconds, or its tokens, are spent (`OptimConfig.schedule`, wsd). Where rates are
tried, that comes first; then seeds are the outer loop and methods the inner one, so that a machine whose speed drifts
treats all methods alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from domext_ray.config.jobs import StudyConfig
from domext_ray.config.options.build import identity_of_run
from domext_ray.config.options.declare import require
from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import CorpusError
from domext_ray.model.base import Base
from domext_ray.pretraining.inputs import check_texts
from domext_ray.pretraining.plan import load_run_base, pin_corpus, warn_of_rate, warn_of_rules
from domext_ray.report.summary import read_summary
from domext_ray.runs.run_directory import (
    RunPaths,
    check_identity,
    lock_run,
    read_identity,
    resolve_paths,
    write_run,
)
from domext_ray.storage import Place, write_json, write_text
from domext_ray.studies.methods.arms import Arm, choose_presets, describe_arms, make_configs, plan_arms
from domext_ray.studies.methods.figures import ArmRuns, Study, make_base_figures, make_study, route_runs
from domext_ray.studies.methods.findings import format_study, to_results
from domext_ray.studies.methods.picture import draw_curves, draw_scores, draw_study
from domext_ray.studies.methods.rates import choose_rate, set_rate, try_rates
from domext_ray.studies.methods.runs import (
    BASE,
    Workplace,
    get_or_learn_words,
    limit_run,
    measure_retention,
    name_run,
    train_base,
    train_run,
)
from domext_ray.studies.methods.tasks import check_sets, count_trainings, finetune_seed, read_curves, read_scores
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.data.sources import Sources, require_files, resolve_sources, write_files
from domext_ray.training.evaluate import read_probe

DEFAULT_NAME, TEXTS = "comparison", "texts"
Rates = Mapping[str, Mapping[float, float | None]]


def run_study(config: StudyConfig) -> Place:
    """Train every method on every seed, compare them, and return the study's directory.

    With `dry_run` everything is checked and the plan printed, and nothing is started or written.
    """
    presets = choose_presets(config)
    configs = [run for name, preset in presets.items() for run in make_configs(config, name, preset).values()]
    paths = _resolve_study_paths(config)
    ends = [limit_run(config, run) for run in configs]
    longest = max(ends, key=lambda each: (each.vocab.extends_base, each.train.max_tokens))
    stored = read_identity(paths.run) or {}
    pinned = pin_corpus(replace(longest, replay=config.replay), stored)  # all runs read the same
    config = replace(config, corpus=pinned.corpus, replay=pinned.replay)
    configs = [run for name, preset in presets.items() for run in make_configs(config, name, preset).values()]
    strictest = max(configs, key=lambda each: (bool(each.replay.corpus), each.objective.keep == "kl"))
    base = load_run_base(strictest)
    assert base is not None, "StudyConfig refuses none"
    num_examples = _check_inputs(config, strictest, base, paths)
    if longest.vocab.size:  # a method learns words, which not every text allows
        check_texts(longest, base)
    arms, left_out = plan_arms(config, presets, base)
    texts = _find_texts(config, strictest, paths)
    identity = _describe_identity(config, presets, base.sha256, strictest, texts, paths)
    check_identity(paths.run, identity, grows=True)  # methods, seeds and general text may come later
    for name, reason in left_out.items():
        print(f"note: {name} is left out: {reason}", flush=True)
    warn_of_rules(base)
    if not config.rates:
        warn_of_rate(config.optim, base, "--rates")
    if config.dry_run:
        print(describe_plan(config, arms, paths))
        return paths.run
    print(f"study directory: {paths.run}", flush=True)
    with lock_run(paths.run):
        for name, sources in texts.items():
            write_files(paths.run / TEXTS / name, sources.record())
        _run_all(Workplace(config, paths, num_examples), arms, left_out, identity, base)
    return paths.run


def _check_inputs(config: StudyConfig, strictest: PretrainConfig, base: Base, paths: RunPaths) -> tuple[int, ...]:
    """Read the beginnings of all texts that the study trains on and asks for, and the sets; return their labels."""
    read_probe(config.train.general_probe)
    check_texts(strictest, base)
    num_examples = check_sets(config)
    if not config.retention:
        return num_examples
    for option, place in (("run.dir", str(paths.run)), ("base", config.base)):
        require("," not in place, option, place, "a path without commas when --retention is given")
    try:
        check_corpus(config.retention, config.prepare)
    except CorpusError as error:
        raise CorpusError(f"--retention: {error}") from error
    return num_examples


def describe_plan(config: StudyConfig, arms: Mapping[str, Arm], paths: RunPaths) -> str:
    """Return what a dry run prints: every method with its sizes, parameters and rate, and what the study will take."""
    num_runs, num_tried = len(arms) * config.seeds, len(arms) * len(config.rates)
    share = num_runs + num_tried * config.tune_frac
    goal = f"{config.seconds:g} seconds" if config.seconds else _describe_tokens(config)
    hours = f", {share * config.seconds / 3600:.1f} hours of training" if config.seconds else ""
    tried = f" and {num_tried} that try rates" if num_tried else ""
    tuned = count_trainings(config, [arm.config.vocab.extends_base for arm in arms.values()])
    follows = f"; {tuned} fine-tunings follow" if tuned else ""
    counts = [arm.spec.counts for arm in arms.values()]
    kept = [3 * count.trainable * config.run.keep_checkpoints + count.total for count in counts]
    disk = f"checkpoints and exports take about {4 * config.seeds * sum(kept) / 1e9:.2f} GB of disk"
    return "\n".join(
        [
            describe_arms(arms, tunes=bool(config.rates)),
            f"{len(arms)} methods, {config.seeds} seeds, {goal} per run: {num_runs} runs{tried}{hours}{follows}; "
            f"starts and evaluations come on top; {disk}",
            f"study directory: {paths.run}",
            "dry run: nothing was started",
        ]
    )


def _resolve_study_paths(config: StudyConfig) -> RunPaths:
    named = replace(config.run, name=config.run.name or DEFAULT_NAME)
    return resolve_paths(PretrainConfig(run=named, prepare=config.prepare))


def _find_texts(config: StudyConfig, strictest: PretrainConfig, paths: RunPaths) -> dict[str, Sources]:
    """The texts that the study reads, but for what a base writes; none for a dry run of a new study.

    Texts other than those that it began with are a RunError.
    """
    if config.dry_run and not read_identity(paths.run):
        return {}
    specs = {"corpus": config.corpus}
    if strictest.replay.corpus and not strictest.replay.is_written:
        specs["replay"] = strictest.replay.corpus
    texts = {name: resolve_sources(spec, config.prepare, paths.corpora) for name, spec in specs.items()}
    for name, sources in texts.items():
        option = "--corpus" if name == "corpus" else "--replay.corpus"
        require_files(
            paths.run / TEXTS / name,
            sources.record,
            f"so that {option} {sources.spec!r} is not the text that the study in {paths.run} was made with; bring "
            "that back, or give another --run.name",
        )
    return texts


def _describe_identity(
    config: StudyConfig,
    presets: Mapping[str, Any],
    base_sha256: str,
    strictest: PretrainConfig,
    texts: Mapping[str, Sources],
    paths: RunPaths,
) -> dict[str, Any]:
    """What may not change in a study's directory; further methods, budgets and seeds may come."""
    stored = read_identity(paths.run) or {}
    identity = identity_of_run(config)
    del identity["replay"], identity["finetune"]  # that counts once a method reads general text; this in its own runs
    own = {name: config.count_tokens(name) for name in presets if config.tokens}
    if general := strictest.replay.corpus:
        identity["replay_frac"] = config.replay.frac
        identity |= {"replay_fingerprint": general} if strictest.replay.is_written else {"replay.corpus": general}
    for name, sources in texts.items():
        is_former = stored.get(f"{name}_fingerprint") == sources.former_fingerprint
        identity[f"{name}_fingerprint"] = sources.former_fingerprint if is_former else sources.fingerprint
    scored = {name: getattr(config.train, name) for name in ("eval_rows", "general_probe")}
    return {
        **identity,
        "train": {**identity["train"], **scored},
        "base_sha256": base_sha256,
        **{f"presets.{name}": preset for name, preset in presets.items()},
        **{f"presets.{name}.tokens": tokens for name, tokens in own.items()},
    }


def _run_all(
    place: Workplace, arms: Mapping[str, Arm], left_out: Mapping[str, str], identity: Mapping[str, Any], base: Base
) -> None:
    """Score the base, learn vocabularies, try rates, then train every seed of every method."""
    config, folder = place.config, place.paths.run
    trains = "biases" if base.config.has_biases else "layer_norms"  # either starts from the base as it is
    unchanged = {"method": {"trains": trains, "heads": 0, "ffn_units": 0}}
    train_base(place, make_configs(config, BASE, unchanged)[BASE])
    write_run(folder, identity={**(read_identity(folder) or {}), **identity})
    ready = [get_or_learn_words(place, arm) for arm in arms.values()]
    rates: Rates = {arm.name: try_rates(place, arm) for arm in ready if config.rates}
    ready = [set_rate(arm, choose_rate(rates[arm.name], config.rates_by)) if rates else arm for arm in ready]
    text = ""
    for i in range(config.seeds):
        seed, is_new = config.seed + i, False
        for k, arm in enumerate(ready, start=i * len(ready) + 1):
            print(f"\n[{k} of {config.seeds * len(ready)}] {arm.name}, seed {seed}", flush=True)
            is_new |= train_run(place, limit_run(config, arm.config), name_run(arm.name, seed), seed)
        is_new |= finetune_seed(place, [arm.name for arm in ready], i)
        if is_new or i == config.seeds - 1:
            text = _write_results(place, ready, range(config.seed, seed + 1), rates, left_out)
    print(f"\n{text}\ntable: {folder / 'comparison.md'}\npicture: {folder / 'comparison.png'}")


def _write_results(
    place: Workplace, arms: Sequence[Arm], seeds: Sequence[int], rates: Rates, left_out: Mapping[str, str]
) -> str:
    """Compare the seeds that all methods have finished; return the comparison as Markdown."""
    config, folder = place.config, place.paths.run
    study = _read_study(place, arms, seeds, rates, left_out)
    text = format_study(study)
    asked = {
        name: getattr(config, name)
        for name in ("budget", "budgets", "seconds", "tokens", "tokens_by_method", "rates", "rates_by", "tune_frac")
    }
    write_json(folder / "results.json", {"seeds": list(seeds), **asked, **to_results(study)})
    write_text(folder / "comparison.md", text)
    draw_study(study, folder / "comparison.png")
    if study.scores:
        draw_scores(study.scores[-1], folder / "tasks.png")
    if study.curves:
        draw_curves(study.curves, folder / "labels.png")
    return text


def _read_study(
    place: Workplace, arms: Sequence[Arm], seeds: Sequence[int], rates: Rates, left_out: Mapping[str, str]
) -> Study:
    """Gather what the runs reached; those with routers count a second time, as methods of their own."""
    asks = bool(place.config.retention)
    names = [name_run(arm.name, seed) for arm in arms for seed in seeds]
    retained, accuracies = measure_retention(place, names) if asks else (None, {})
    runs = []
    for arm in arms:
        own = {seed: name_run(arm.name, seed) for seed in seeds}
        runs.append(
            ArmRuns(
                arm.name,
                arm.config.method.trains,
                arm.config.method.trainable_budget or None,
                arm.config.optim.lr,
                {seed: read_summary(place.locate(name) / "summary.json") for seed, name in own.items()},
                {seed: accuracies[name] for seed, name in own.items()} if asks else {},
                family=arm.preset,
                tried=rates.get(arm.name, {}),
                tried_by=place.config.rates_by,
            )
        )
    routed = [method for method in runs if method.has_router]
    names = [name_run(method.name, seed) for method in routed for seed in seeds]
    _, accuracies = measure_retention(place, names, route=True) if asks and names else (None, {})
    for method in routed:
        kept = {seed: accuracies[name_run(method.name, seed)] for seed in seeds} if asks else {}
        runs.insert(runs.index(method) + 1, route_runs(method, kept))
    base = make_base_figures(read_summary(place.locate(BASE) / "summary.json"), retained)
    setting, names = describe_setting(place.config, len(seeds)), [arm.name for arm in arms]
    scores, curves = read_scores(place, names, seeds), read_curves(place, names, seeds)
    return make_study(base, runs, setting, place.config.seconds, left_out, scores, curves)


def _describe_tokens(config: StudyConfig) -> str:
    others = ", ".join(f"{name} {config.count_tokens(name):,}" for name in config.tokens_by_method)
    return f"{config.tokens:,} tokens" + (f" ({others})" if others else "")


def describe_setting(config: StudyConfig, num_seeds: int) -> str:
    """Return what all runs of a study have in common, as one or two sentences."""
    goal = f"{config.seconds:g} seconds of training" if config.seconds else _describe_tokens(config)
    budgets = [f"{percent:.3g} %" for percent in (100 * budget for budget in config.budgets or (config.budget,))]
    size = f"a trainable budget of {', '.join(budgets)} where a method has a size"
    size = size if config.budgets or config.budget else "sizes as given"
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds (mean ± standard deviation)"
    base, corpus = hide_places(config.base), hide_places(config.corpus)
    setting = f"Base {base}, corpus {corpus}: {goal} per run, {size}, {seeds}."
    if not config.rates:
        return setting
    tried = ", ".join(f"{rate:g}" for rate in sorted(config.rates))
    run = f"in a run of the first seed with {config.tune_frac:.0%} of the {'time' if config.seconds else 'tokens'}"
    if config.rates_by == "loss":
        found, ending = "one half of the held-out text took the fewest bits", "; figures are those of the other half"
    else:
        number = len(config.tasks)
        mean = f" (the mean of {number} sets)" if number > 1 else ""
        found, ending = f"fine-tuning on {config.sizes[-1]} labels had the best figure on dev{mean}", ""
    return f"{setting} Of the rates {tried} each method has the one after which {found}, {run}{ending}."
