"""The package from Python, in a script or a notebook: the verbs of `domext` that make and use models, as functions.

Enters: options by name, as on the command line: `**{"train.max_steps": 100}`, or a group as a dictionary,
`train={"max_steps": 100}`. They stand on the same presets, and the same pipeline carries them out. Leaves: an object
that says where everything is. A user's mistake raises a `DomextError`, whose message is one sentence. Ctrl-C saves the
next training step and raises `runtime.stopping.Stopped`, a KeyboardInterrupt; the same call goes on from there.

Ray is started when it is first needed and stays, so later calls begin at once; `ray.shutdown()` ends it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from domext_ray.commands.main import find_job
from domext_ray.config.options.build import Given, read_values
from domext_ray.config.options.submitted import find_input
from domext_ray.errors import BaseModelError, DomextError, RunError, find_storage_error
from domext_ray.files import ASSETS
from domext_ray.progress import draw_bar, quiet_libraries
from domext_ray.runtime.stopping import raise_user_error
from domext_ray.storage import Place, Where, require_readable
from domext_ray.text.data.names import SHIPPED_BASE, check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from domext_ray.report.tables import Table
    from domext_ray.text.corpus.manifest import Manifest


_SHOWN = 10
"""Lines of a folder's table, at most, that may be many: labels."""


@dataclass(frozen=True, repr=False)
class Run:
    """A pre-training run; `Run("runs/af")` is one that was made before.

    Args:
        directory: the run's directory; a `storage.Place` of a run in a bucket.
    """

    directory: Path | Place

    def __post_init__(self) -> None:
        found = self.directory if isinstance(self.directory, Place) else find_input(os.fspath(self.directory))
        place = Place(found)
        object.__setattr__(self, "directory", Path(found).expanduser() if place.is_local else place)

    @property
    def _place(self) -> Place:
        return Place(self.directory)

    @property
    def export_dir(self) -> Path:
        """The Hugging Face folder of its model; of a run in a bucket a copy in the cache."""
        return (self._place / "export").local()

    @property
    def report(self) -> Path:
        """Its page of figures, report.html; of a run in a bucket a copy in the cache."""
        return (self._place / "report.html").local()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: parameters, figures before and after, steps, seconds.

        Raises:
            RunError: it has not ended, or the file is damaged.
        """
        from domext_ray.report.summary import read_summary

        return read_summary(self._place / "summary.json")

    def __repr__(self) -> str:
        try:
            state = self._describe()
        except (DomextError, KeyError):
            state = "not finished"
        return f"<{type(self).__name__} {self.directory}: {state}>"

    def _repr_html_(self) -> str | None:
        """What a notebook shows: its table and a link to its page; None, which is as `repr`: it has not ended."""
        from domext_ray.report.page import format_result

        try:
            return format_result(self._tabulate(), os.path.relpath(self.report))
        except (DomextError, KeyError, FileNotFoundError):
            return None

    def _tabulate(self) -> Table:
        from domext_ray.report.figures import tabulate_summary

        return tabulate_summary(self.summary)

    def _describe(self) -> str:
        from domext_ray.report.figures import find_comparable

        summary = self.summary
        own, steps = find_comparable(summary), summary["train"]["steps"]
        return f"{steps:,} steps, {own.name} {own.show(own.reference)} -> {own.show(own.after)}"


@dataclass(frozen=True, repr=False)
class FinetunedRun(Run):
    """A fine-tuning run; `FinetunedRun("runs/af-ner")` is one that was made before."""

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: every figure with its interval, the grid's trainings, baselines.

        Raises:
            RunError: it has not ended, or the file is damaged.
        """
        from domext_ray.finetuning.finetuned import read_finetune_summary

        return read_finetune_summary(self._place)

    @property
    def metric(self) -> str:
        """The figure by which dev chose, such as micro.f1."""
        return str(self.summary["metric"])

    @property
    def scores(self) -> dict[str, float]:
        """That figure of the chosen model on dev and, where the set has one, on test."""
        from domext_ray.finetuning.output import get_figure

        summary = self.summary
        splits = (split for split in ("dev", "test") if summary[split])
        return {split: get_figure(summary[split], summary["metric"]) for split in splits}

    @property
    def verdict(self) -> str:
        """The difference to the model of `against`, its interval, and what that says; empty: it has none."""
        return str(self.summary.get("against", {}).get("verdict", ""))

    def _tabulate(self) -> Table:
        from domext_ray.finetuning.output import tabulate_summary

        table = tabulate_summary(self.summary)
        return replace(table, notes=[*table.notes, self.verdict])

    def _describe(self) -> str:
        scores = ", ".join(f"{score:.3f} on {split}" for split, score in self.scores.items())
        return f"{self.metric} {scores}"


class Folder(PosixPath):
    """A folder of results: a path in all, and in a notebook a short table."""

    def _repr_markdown_(self) -> str | None:
        """What a notebook shows; None, which is as `repr`: there is no table, or none yet."""
        try:
            return self._tabulate()
        except (DomextError, KeyError, FileNotFoundError, NotADirectoryError):
            return None

    def _tabulate(self) -> str:
        from domext_ray.files import read_json
        from domext_ray.report.tables import Table

        where = f"`{self}`"
        if (study := self / "comparison.md").is_file():
            lines = study.read_text(encoding="utf-8").splitlines()
            begun = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
            return "\n".join([*itertools.takewhile(lambda line: line.startswith("|"), begun), "", where])
        found = read_json(Place(self / "summary.json"), "make it again")
        if table := found.get("table"):  # of a sweep
            return f"{table}\n\n{where}"
        rows = [(name, f"{found[name]:,}") for name in ("rows", "empty", "malformed")]
        rows += [(f"label {name}", f"{number:,}") for name, number in [*found.get("labels", {}).items()][:_SHOWN]]
        return Table(("", "number"), rows, [where]).show()


def pretrain(
    method: str = "af",
    *,
    base: Where | None = None,
    corpus: Where | list[Where] | None = None,
    preset: str = "",
    config: Where = "",
    **options: Any,
) -> Run:
    """Carry a pre-training run from text to report, as `domext pretrain METHOD` does.

    Args:
        method: af, bottleneck, exbert, lora or bert; its preset is what the options change.
        base: the model that is adapted: "general-mini" (ships), a folder, a hub id, or "none"; None: the preset's.
        corpus: its text: a file, a glob, a folder, or a list of them; None: the preset's.
        preset: name of another preset than the method's own, such as af_base.
        config: a YAML file of options, which changes the preset.
        options: all others by their names; `domext pretrain METHOD --help_all` lists them.

    Returns:
        The run; with `dry_run=True` it is described and not started.
    """
    named = {"base": base, "corpus": corpus}
    return Run(_carry_out(["pretrain", method], named, preset, config, options, "pretraining.pipeline:run_pretraining"))


def prepare(
    *,
    base: Where | None = None,
    corpus: Where | list[Where] | None = None,
    preset: str = "",
    config: Where = "",
    **options: Any,
) -> Manifest | None:
    """Prepare a corpus ahead of `pretrain`, which finds it, as `domext prepare corpus` does.

    Args:
        base: the model whose tokenizer cuts it.
        corpus: the text.
        preset: as of `pretrain`.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`.

    Returns:
        What was prepared: its folder, rows and tokens; None with `dry_run=True`.
    """
    named = {"base": base, "corpus": corpus}
    made: Manifest | None = _carry_out(["prepare", "corpus"], named, preset, config, options)
    return made


def finetune(
    task: Where | None = None,
    data: Where | None = None,
    model: Where | Run | None = None,
    *,
    against: Where | Run | None = None,
    preset: str = "",
    config: Where = "",
    **options: Any,
) -> FinetunedRun:
    """Fine-tune a model on a labelled set and score it, as `domext finetune` does.

    Args:
        task: a task family such as "ner", a described set such as "bc5cdr", or a YAML file that describes one.
        data: folder of the labelled files, or a name on the hub.
        model: a run, an export, a base, or a hub id.
        against: another one, fine-tuned in the same way; `FinetunedRun.verdict` says how they differ.
        preset: as of `pretrain`.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`.

    Returns:
        The run, with its scores; with `dry_run=True` it is described and not started.
    """
    named = {"task": task, "data": data, "model": _name(model), "against": _name(against)}
    return FinetunedRun(_carry_out(["finetune"], named, preset, config, options))


def predict(
    model: Where | Run, input: Where | list[Where], output: Where, *, config: Where = "", **options: Any
) -> Folder | Place:
    """Predict with a model on any number of texts, as `domext predict` does.

    Args:
        model: a fine-tuned run or its export, which does its task; another model, which fills masks; or BANK:NAME.
        input: text, JSONL, CSV or Parquet: a file, a glob, a folder, or a list of them.
        output: folder of what is predicted; the same call goes on with what is missing there.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`.

    Returns:
        The folder: predictions/ (Parquet, which `pandas.read_parquet` reads), malformed.jsonl and summary.json. With
        `dry_run=True` nothing is written.
    """
    named = {"model": _name(model), "input": input, "output": output}
    return _as_folder(_carry_out(["predict"], named, "", config, options))


def embed(
    model: Where | Run, input: Where | list[Where], output: Where, *, config: Where = "", **options: Any
) -> Folder | Place:
    """Make a vector of each of any number of texts, as `domext embed` does.

    Args:
        model: a run, an export, a base, a hub id, or BANK:NAME.
        input: as of `predict`.
        output: as of `predict`.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`.

    Returns:
        The folder: predictions/ with "id" and "vector" or, with `format="npy"`, vectors.npy and ids.jsonl.
    """
    named = {"model": _name(model), "input": input, "output": output}
    return _as_folder(_carry_out(["embed"], named, "", config, options))


def compare(
    methods: list[str] | str | None = None,
    *,
    corpus: Where | list[Where] | None = None,
    preset: str = "",
    config: Where = "",
    **options: Any,
) -> Folder | Place:
    """Train several methods side by side on several seeds, as `domext compare` does.

    Args:
        methods: their names, such as ["full", "exbert"]; None: the preset's.
        corpus: as of `pretrain`.
        preset: as of `pretrain`.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`, such as `tasks`, `data` and `labels`.

    Returns:
        The study's directory: comparison.md, results.json and pictures.
    """
    named = {"methods": methods, "corpus": corpus}
    return _as_folder(_carry_out(["compare"], named, preset, config, options))


def sweep(
    tasks: list[str] | str | None = None,
    data: Where | list[Where] | None = None,
    *,
    corpus: Where | list[Where] | None = None,
    preset: str = "",
    config: Where = "",
    **options: Any,
) -> Folder | Place:
    """Search a space of options for downstream F1 with Ray Tune, as `domext sweep` does.

    Args:
        tasks: task families or described sets; None: the preset's.
        data: the folder of each one's labelled files.
        corpus: as of `pretrain`.
        preset: a sweep's, such as "sweeps/exbert_sizes_mini"; it has the space.
        config: as of `pretrain`.
        options: all others by their names, as of `pretrain`.

    Returns:
        The sweep's directory: sweep.html, best.yaml (`pretrain(config=...)` takes it) and trials/, each a run. A
        notebook shows its best trials.
    """
    named = {"tasks": tasks, "data": data, "corpus": corpus}
    return _as_folder(_carry_out(["sweep"], named, preset, config, options))


def _name(model: Where | Run | None) -> Where | None:
    return str(model.directory) if isinstance(model, Run) else model


def _as_folder(place: Place) -> Folder | Place:
    return Folder(place.local()) if place.is_local else place


def _carry_out(
    words: list[str], named: dict[str, Any], preset: str, config: Where, options: dict[str, Any], run: str = ""
) -> Any:
    """Carry out a job, as `Job.start` does."""
    with draw_bar(), raise_user_error():
        job, _ = find_job(words)
        given = {name: value for name, value in named.items() if value is not None}
        settings = read_values(job.config_class, {**given, **options})
        return job.start(Given(settings, preset, os.fspath(config)), run)


def load(place: Where | Run) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Load a model and its tokenizer, on the CPU, in fp32 and evaluation mode; code of its folder is never run.

    Args:
        place: a run or its directory (its export, or its newest checkpoint where that is newer), an export, the folder
            or hub id of a base, or "general-mini". Runs and exports may be in a bucket.

    Returns:
        The tokenizer and the model: with a masked-LM head, or with the head that it was fine-tuned with.

    Raises:
        BaseModelError: it is none of these, or cannot be read.
        RunError: a run without a usable checkpoint.
    """
    where = place.directory if isinstance(place, Run) else place
    named = str(where) if isinstance(where, Place) else find_input(os.fspath(where))
    folder = Place(named)
    if not (folder / "config.yaml").is_file():
        return _load_pretrained(named, folder)
    from domext_ray.export.folder import read_export_record
    from domext_ray.model.build import merge_extensions
    from domext_ray.runs.run_directory import TRAININGS
    from domext_ray.training.checkpoint import list_steps
    from domext_ray.training.start import rebuild_run

    export = folder / "export"
    if (folder / TRAININGS).is_dir():
        if (export / "config.json").is_file():
            return _load_pretrained(str(export), export)
        steps = ", ".join(each for each in export.list_names() if (export / each / "config.json").is_file())
        found = f"one model per step of its task ({steps}); give the folder of one, such as {export}/…" if steps else ""
        raise RunError(f"{folder} has {found or 'no export; fine-tune again with export=True'}.")
    record, newest = read_export_record(export), max(list_steps(folder / "checkpoints"), default=0)
    if record is not None and record.step >= newest:
        return _load_pretrained(str(export), export)
    run: Any = rebuild_run(folder)
    merge_extensions(run.model)
    return run.tokenizer, run.model.eval()


def _load_pretrained(named: str, where: Place) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A model that `save_pretrained` wrote: with this library's classes, or a plain one with those of transformers."""
    where = Place(ASSETS / SHIPPED_BASE) if named == SHIPPED_BASE else where
    is_here = where.is_dir()
    source, give = str(where.local()) if is_here else named, "a run, an export, or the folder or hub id of a model"
    if where.exists() and not is_here:
        raise BaseModelError(f"{named!r} is no folder; give {give}.")
    if not is_here:
        check_name("load", named, "model", give, [SHIPPED_BASE])

    import torch
    import transformers

    from domext_ray.model.base import is_own_config
    from domext_ray.model.domext import heads_domext, modeling_domext

    with quiet_libraries():
        try:
            values, _ = transformers.PreTrainedConfig.get_config_dict(source)
            home = heads_domext if is_own_config(values) else transformers
            name = (values.get("architectures") or ["BertForMaskedLM"])[0]
            model_class = getattr(home, name, None) or getattr(modeling_domext, name)
            model, info = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # the hub's client and damaged files raise a dozen kinds
            if is_here:
                require_readable(where.local())
            kind, said = type(error).__name__, " ".join(str(error).split())[:200].rstrip(".")
            fault = f"cannot be loaded ({said or kind})"
            fault = fault if is_here else f"is no folder here and could not be fetched from the hub ({kind})"
            raise find_storage_error(error) or BaseModelError(f"{named!r} {fault}; give {give}.") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        raise BaseModelError(f"{named!r} lacks the tensor {missing} that its config.json asks for; save it again.")
    return tokenizer, model.eval()
