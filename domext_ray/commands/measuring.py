"""The verbs that measure and compare: finetune, sweep, ablate, evaluate …, compare and compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from domext_ray.commands.early import check_set, check_text
from domext_ray.commands.job import NOT_FINE_TUNING, Job
from domext_ray.config.finetune import AblateConfig, FinetuneConfig
from domext_ray.config.jobs import CompareConfig, ForgettingConfig, RetrievalConfig, StudyConfig
from domext_ray.config.options.submitted import require_lasting
from domext_ray.config.sweep import SweepConfig
from domext_ray.storage import Place


def _check_set(config: FinetuneConfig | AblateConfig) -> None:
    """Refuse a task or a place that does not exist."""
    check_set(config.task, config.data)


FINETUNE = Job(
    "finetune",
    """Fine-tune a model on a labelled set: a grid with restarts, the best on dev, test scored once.

    domext finetune                                        # code entities, which ship
    domext finetune --task ner --data DIR --model runs/af --grid.lr 1e-3,5e-4 --grid.epochs 3 --run.name ner
    domext finetune --task ner --data DIR --model runs/af --against general-mini --grid.restarts 3
    domext finetune --task chemprot --data DIR --model bert-base-uncased --grid.lr 5e-5,3e-5,2e-5 \\
        --grid.batch_size 16,32 --grid.epochs 2,3,4 --grid.restarts 3
    domext finetune --task ner --data DIR --model BASE --method.trains extensions --method.lora_rank 8

DIR has train, dev (or devel) and test files. --task is a family (ner, nested_ner, relation, relation_extraction,
classification, multilabel, regression, qa, multiple_choice, normalization), a described set (bc5cdr, chemprot, rte,
...) or a YAML that describes yours. The model is a run's directory, an export, a base, or a hub id; --keep_head true
keeps the head of a fine-tuned one. Every extension except words can learn the task, in addition to those of the model:
--method.trains extensions trains them all with the head, and adapter only the new adapter. --against trains another
model with the same grid, seeds and examples, and the job ends with the difference, its interval and the conclusion. The
run directory gets summary.json (dev and test with 95 % intervals), predictions.jsonl, report.html, errors.html
(mistakes on dev), scores.png, export/. The same command resumes unfinished trainings.""",
    FinetuneConfig,
    "finetuning.finetune:run_finetuning",
    "finetune",
    main=("method.trains", "method.heads", "method.ffn_units", "method.bottleneck_size", "method.lora_rank"),
    reads=tuple(f"-{option}" for option in NOT_FINE_TUNING),
    check=_check_set,
)


def _check_sets(config: SweepConfig | StudyConfig) -> None:
    """Refuse a task, a place or a text that does not exist."""
    check_text("corpus", config.corpus, config.prepare)
    for task, data in zip(config.tasks, config.places, strict=True):
        check_set(task, data)


NOT_OF_SEVERAL_SETS = (
    *("finetune.task", "finetune.data", "finetune.model", "finetune.model_step", "finetune.against"),
    *("finetune.keep_head", "finetune.run.", "finetune.dry_run", "finetune.export"),
    *("finetune.labelled.num_examples", "finetune.labelled.examples_seed"),
    *(f"finetune.{option}" for option in NOT_FINE_TUNING),
)
"""What a sweep and a study decide for their fine-tunings, or these do not read."""
DECIDED = (
    *("train.max_", "train.long_", "optim.decay_steps", "optim.warmup_steps", "scale.num_workers", "scale.max_"),
    *("finetune.scale.", *NOT_OF_SEVERAL_SETS),
)
"""What a sweep decides for its trials."""

SWEEP = Job(
    "sweep",
    """Search a space of extension sizes, heads, bottlenecks or any other option for downstream F1, with Ray Tune.

    domext sweep                                          # AF Adapter's heads, units and rate, on any machine
    domext sweep --tasks ner --data DIR --corpus TEXT --run.name clinic
    domext sweep --preset sweeps/exbert_sizes_mini

A trial pre-trains under --budget, fine-tunes on --tasks and is scored on dev; test is never read. The file (without
--preset the preset sweeps/af_mini) has the space, and all options of a training job apply to every trial. The sweep's
directory gets sweep.html (leaderboard, figures), best.yaml (domext pretrain af --config best.yaml) and trials/, each a
run that other jobs accept as a model. The same command resumes the sweep.""",
    SweepConfig,
    "studies.sweep.sweep:run_sweep",
    "sweeps/af_mini",
    reads=tuple(f"-{option}" for option in DECIDED),
    check=_check_sets,
)


def _ablate(config: AblateConfig) -> None:
    from domext_ray.studies.ablation import arms, report, spans

    if config.study == "spans":
        work = spans.prepare_spans(config)
        if config.dry_run:
            print(spans.describe_spans(work))
            return
        folder, table = work.folder, report.write_spans(spans.study_spans(work), work.folder)
    else:
        planned = arms.plan_arms(config)
        if config.dry_run:
            print(arms.describe_arms(config, planned))
            return
        folder = arms.find_folder(config)
        table = report.write_arms(config.study, planned, arms.train_arms(planned), folder)
    print(f"{table}\nfigures, table and picture: {folder}")


def _list_studied(config: AblateConfig) -> tuple[str, ...]:
    """Return the options that a study reads, or behind a dash those that it does not."""
    of_spans = ("finetuned", "adapter", "remove_norms")
    if config.study == "spans":
        of_all = ("study", "data", "model", "output", "num_resamples", "dry_run", "scale.use_gpu", "scale.cpus")
        return (*of_spans, *of_all)
    others = ("sizes", "top_layers") if config.study == "sigma" else ("sigmas",)
    return tuple(f"-{option}" for option in (*of_spans, *others))


def _check_study(config: AblateConfig) -> None:
    if config.study != "spans":  # which takes both from its run
        _check_set(config)
    elif not config.output:
        require_lasting("finetuned", config.finetuned, "given with --output")


ABLATE = Job(
    "ablate",
    """Study bottlenecks like their paper: remove them by layers, vary their start, vary their size.

    domext ablate --study spans --finetuned runs/af-ner            # without retraining; heat map over layers
    domext ablate --study sigma --task ner --data DIR --model runs/af --run.name ner
    domext ablate --study size --task ner --data DIR --model bert-base-uncased --run.name ner --sizes 8,64,256

Sigma and size are fine-tuning runs in RUN.DIR/NAME-..., with the options of domext finetune; dev chooses each run's
rate from --grid.lr. The same command resumes them. Figures, tables and pictures go to --output.""",
    AblateConfig,
    _ablate,
    "ablate",
    reads=tuple(f"-{option}" for option in (*NOT_FINE_TUNING, "features.", "against")),
    narrow=_list_studied,
    check=_check_study,
)


def _measure_forgetting(config: ForgettingConfig) -> None:
    from domext_ray.studies.forgetting.forgetting import choose_device, make_folder, measure_forgetting, read_models
    from domext_ray.studies.forgetting.report import write_forgetting
    from domext_ray.studies.forgetting.scales import find_runs, measure_curve

    device, models = choose_device(config), read_models(config)
    runs = find_runs(config, models)
    make_folder(Path(config.output))
    curves = {run.name: measure_curve(run, config.scales, device) for run in runs}
    result = measure_forgetting(config, models) if config.has_corpus else None
    print(write_forgetting(config, result, curves))
    print(f"figures, table and picture: {config.output}")


def _check_general_text(config: ForgettingConfig) -> None:
    if config.has_corpus:
        check_text("corpus", config.corpus, config.prepare)


_OF_GENERAL_TEXT = ("num_texts", "mask_frac", "max_length", "shared_words", "batch_size", "route", "seed", "prepare.")

FORGETTING = Job(
    "evaluate forgetting",
    """Compare models by the masked words of general text that they still predict: AF Adapter's test of forgetting.

    domext evaluate forgetting --models base=general-mini,af=runs/af --corpus general.txt --output forgetting
    domext evaluate forgetting --models runs/af --scales 0.25,0.5,0.75    # at smaller scales of what it added

With --scales each run, and each export with an adapter, is also measured at smaller scales of what it added to its
base. If a run's prepared text still exists, the job also reports the gain on its held-out text, the loss on everyday
sentences, and the largest scale with almost no loss; --corpus is then optional.""",
    ForgettingConfig,
    _measure_forgetting,
    reads=tuple(f"-prepare.{option}" for option in ("held_out_frac", "cross_documents", "packed", "cache_dir", "pair")),
    narrow=lambda config: () if config.has_corpus else tuple(f"-{option}" for option in _OF_GENERAL_TEXT),
    check=_check_general_text,
)


def _evaluate_retrieval(config: RetrievalConfig) -> None:
    from domext_ray.studies.retrieval.report import write_retrieval
    from domext_ray.studies.retrieval.retrieval import evaluate_retrieval

    print(write_retrieval(config, *evaluate_retrieval(config)))
    print(f"figures and table: {config.output}")


RETRIEVAL = Job(
    "evaluate retrieval",
    """Compare models by the documents that their vectors find: nDCG@10 and recall on a collection in BEIR's layout.

    domext evaluate retrieval --models base=general-mini,runs/notes-vectors --data scifact --output retrieval

The folder has corpus.jsonl, queries.jsonl and qrels/test.tsv. Every document is compared with every query, by the
cosine of their vectors. Figures have bootstrap 95 % intervals over queries; differences to the first model are
paired.""",
    RetrievalConfig,
    _evaluate_retrieval,
)


COMPARE = Job(
    "compare",
    """Compare methods with one trainable budget and one training time, several seeds each.

    domext compare --seconds 90                            # the small base and corpus that ship
    domext compare --preset compare_base --corpus 'texts/*.txt' --methods full,lora,af --seconds 3600
    domext compare --corpus 'texts/*.txt' --replay.corpus general.txt --methods full,full_kept,af_words \\
        --rates 3e-4,1e-3,3e-3 --retention 'other/*.txt' --seconds 600
    domext compare --corpus 'texts/*.txt' --tokens 2000000 --methods full,exbert --tasks ner --data sets/ner

Makes RUN.DIR/RUN.NAME with a run for each method and seed, comparison.md, comparison.png and results.json: bits per
character gained on held-out text of the domain against points of general accuracy lost, and with --tasks the scores of
the base and all models after fine-tuning. Runs end at rate 0 when their --seconds or --tokens are spent. The same
command resumes the study; you may add --methods, --budgets or --seeds later. A method is options of a training job
under a name: in the preset compare, for a BERT-base in compare_base, in --presets or a --config file. Only methods
whose presets have objective.keep, keep_weight or replay read the general text of --replay.corpus.""",
    StudyConfig,
    "studies.methods.study:run_study",
    "compare",
    main=("replay.corpus",),
    reads=(
        *("-train.max_", "-train.long_", "-optim.lr", "-optim.schedule", "-optim.decay_steps"),
        *(f"-{option}" for option in NOT_OF_SEVERAL_SETS),
    ),
    check=_check_sets,
)


def _compare_runs(config: CompareConfig) -> None:
    from domext_ray.finetuning import comparison as finetuning
    from domext_ray.report.compare import choose_runs, draw_comparison, read_run, tabulate_runs
    from domext_ray.report.plots import check_picture

    folders = choose_runs(config.runs)
    picture = Place(config.output)
    check_picture(picture)
    if any(finetuning.is_finetuned(folder) for folder in folders):
        finetuned = [finetuning.read_finetuned(folder) for folder in folders]
        finetuning.check_comparable(finetuned)
        lines = finetuning.compare_finetuned(finetuned)
        finetuning.draw_finetuned(finetuned, lines, picture)
        table = finetuning.tabulate_finetuned(finetuned, lines)
    else:
        runs = [read_run(folder) for folder in folders]
        draw_comparison(runs, picture)
        table = tabulate_runs(runs)
    print(f"{table.show()}\n\npicture: {config.output}")


COMPARE_RUNS = Job(
    "compare runs",
    """Compare finished runs: pre-training runs on one corpus, or models fine-tuned on one labelled set.

    domext compare runs --runs runs/af,runs/exbert,runs/bert --output comparison.png
    domext compare runs --runs runs/base-ner,runs/af-ner,runs/exbert-ner --output ner.png

For pre-training it shows bits per character and forgetting over training seconds. For fine-tuning it shows the set's
metric with 95 % intervals over documents and restarts, and paired differences to the first run. The table is
Markdown.""",
    CompareConfig,
    _compare_runs,
)

JOBS: tuple[Job[Any], ...] = (FINETUNE, SWEEP, FORGETTING, RETRIEVAL, COMPARE, COMPARE_RUNS, ABLATE)
