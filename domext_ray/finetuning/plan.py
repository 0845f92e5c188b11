"""A fine-tuning run's plan: everything that can be known, and refused, before anything is trained.

Enters: a `FinetuneConfig`. Leaves: a `FinetunePlan`, which training, scoring, report and export read. Nothing is
started or written; the run's directory is only looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from domext_ray.config.finetune import POINT, FinetuneConfig, PlaceConfig
from domext_ray.config.options.build import identity_of_run
from domext_ray.errors import ConfigError
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_labelled
from domext_ray.families.task import StagedTask
from domext_ray.finetuning.comparison import AGAINST, is_finetuned
from domext_ray.finetuning.finetuned import make_set_task, open_ledger, read_finetune_summary
from domext_ray.finetuning.seen_texts import describe_seen
from domext_ray.finetuning.training import Point, make_model
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.runs.run_directory import TRAININGS, check_identity, keep_precision, read_identity, resolve_root
from domext_ray.runtime.ray_cluster import resolve_gpu, resolve_precision
from domext_ray.runtime.trials import Ledger, Trial
from domext_ray.storage import Place
from domext_ray.text.data.sources import require_files

GROWING = (*(f"grid.{name}" for name in POINT), "grid.restarts", "seed")
"""Options that say which trainings a run has: they may grow and shrink."""
FEW_STEPS = 100
"""Below so many steps some trainings learn nothing, as a fresh head may not in 24."""


@dataclass(frozen=True)
class FinetunePlan:
    """A fine-tuning run, checked: what all its processes are given."""

    config: FinetuneConfig  # its devices settled as far as they are known
    start: StartModel  # the encoder that all trainings start from
    task: StagedTask  # with its set
    folder: Place  # the run's directory
    identity: dict[str, Any]  # what makes the run this one; see `identity_of_run`
    counts: dict[str, tuple[int, int]]  # trained and all parameters of each stage's model
    cpus: float = 1.0  # of a training
    gpus: float = 0.0
    parallel: int = 1  # trainings at once

    @property
    def trainings(self) -> Place:
        """The run's folder of trainings."""
        return self.folder / TRAININGS

    @property
    def trials(self) -> list[Trial]:
        """The trainings of the grid."""
        return list_trials(self.config, self.start)

    @property
    def ledger(self) -> Ledger:
        """The trainings' records."""
        return open_ledger(self.trainings)

    @property
    def splits(self) -> tuple[str, ...]:
        """What is scored."""
        return ("dev", "test") if self.task.data.test else ("dev",)

    @property
    def notes(self) -> list[str]:
        """What the user should know about the start model, the task and what the run has now."""
        start = self.start
        notes = [f"warning: {start.wrong_rules}"] if start.wrong_rules else []
        if (self.folder / "summary.json").exists():
            now = {trial.name for trial in self.trials}
            ended = _list_ended(read_finetune_summary(self.folder))
            if left_out := [name for name in ended if name not in now]:
                notes.append(
                    f"warning: the figures in {self.folder} are of {len(ended)} trainings, of which this grid lacks "
                    f"{len(left_out)}: new figures are going to replace them. The earlier command brings them back."
                )
        if start.brings is not None and start.head is None:
            kind = start.brings.removeprefix("DomextFor")
            taken = "a new one takes its place (--keep_head true goes on with it)"
            notes.append(f"note: {start.name} brings a {kind} head; {taken}.")
        notes += describe_seen(start, self.task.data)
        grid, number = self.config.grid, len(self.task.data.train)
        longest = max(max(1, number // point["batch_size"]) * point["epochs"] for point in grid.list_points())
        if longest < FEW_STEPS:
            notes.append(
                f"note: a training on these {number:,} examples makes about {longest:.0f} steps at most; below "
                f"{FEW_STEPS} some learn nothing, which widens every interval: raise --grid.epochs."
            )
        return [*notes, *(f"note: {note}" for note in self.task.list_notes())]


def list_trials(config: FinetuneConfig, start: StartModel) -> list[Trial]:
    """Return every training of a run, points of the grid with their restarts, each known by all that decides it.

    So a grid that grows or shrinks keeps what has ended.
    """
    points = config.grid.list_points(new_words=bool(start.config.extension_vocab_size))
    trained = [{**point, "seed": config.seed + i} for point, i in product(points, range(config.grid.restarts))]
    return [Trial(Point(**values).key, values) for values in trained]


def plan_finetuning(config: FinetuneConfig) -> list[FinetunePlan]:
    """Check a run and everything that it reads, and return its plan; with --against that model's plan follows."""
    config = resolve_gpu(config)
    root = resolve_root(config.run.dir)
    starts = [open_model(config.model).load(step=config.model_step, keep_head=config.keep_head)]
    starts += [_load_other(config, starts[0])] if config.against else []
    data = load_labelled(config)
    plan = _plan_model(config, root, starts[0], data)
    if not config.against:
        return [plan]
    start = starts[1]
    compared = {"against": start.name, "against_sha256": start.sha256}
    if "against" in plan.identity:
        check_identity(plan.folder, compared)
    own = PlaceConfig(name=AGAINST, dir=str(plan.folder))
    other = replace(plan.config, model=config.against, model_step=0, against="", export=False, run=own)
    return [replace(plan, identity={**plan.identity, **compared}), _plan_model(other, plan.folder, start, data)]


def _load_other(config: FinetuneConfig, start: StartModel) -> StartModel:
    """Return the model of --against, which is another one than the start model, and not fine-tuned here."""
    named = f"--against {config.against!r}"
    if is_finetuned(Place(config.against)):
        raise ConfigError(
            f"{named} is a fine-tuned run; give the model that it started from, which is then trained like --model, or "
            "compare the two runs with domext compare runs."
        )
    other = open_model(config.against, "--against").load(keep_head=config.keep_head)
    if other.sha256 == start.sha256:
        raise ConfigError(f"{named} has the same weights as --model {config.model!r}; give another model.")
    return other


def _plan_model(config: FinetuneConfig, root: Place, start: StartModel, data: LabelledSet) -> FinetunePlan:
    task = make_set_task(config, start, data)
    default_name = f"{data.name}-{start.name}".replace("/", "-")  # names of the hub have an owner
    folder = root / (config.run.name or default_name)
    identity = {**identity_of_run(config), "model_sha256": start.sha256, "data_sha256": data.sha256}
    identity |= task.identity
    identity["data"] = ""  # where the files are does not matter; what they hold does
    identity["model"] = start.name
    stored = read_identity(folder) or {}
    if stored.get("data_sha256", data.sha256) != data.sha256:
        others = {**identity, "data_sha256": stored["data_sha256"]}  # such as other examples of one file
        check_identity(folder, others, free=GROWING)
        require_data(folder, config, data)
    check_identity(folder, identity, free=GROWING)
    identity |= {name: stored[name] for name in ("against", "against_sha256") if name in stored}  # it may come later
    config = resolve_precision(keep_precision(config, folder))
    return FinetunePlan(config, start, task, folder, identity, count_parameters(config, start, task))


def require_data(folder: Place, config: FinetuneConfig, data: LabelledSet) -> None:
    """Refuse labelled files that are not those of a run, as far as this knows them."""
    given = f"--data {config.data!r}" if config.data else f"--task {config.task}"
    remedy = f"so that {given} is not the labelled set that the run directory {folder} was trained with; "
    require_files(folder, lambda: data.files, f"{remedy}bring that back, or give another --run.name")


def is_finished(plan: FinetunePlan) -> bool:
    """Whether the planned run has ended with just these trainings, and its report and its export are there.

    With --against its summary has the difference, too.
    """
    folder, config = plan.folder, plan.config
    has_export = not config.export or (folder / "export").exists()
    if not ((folder / "summary.json").exists() and (folder / "report.html").exists() and has_export):
        return False
    summary = read_finetune_summary(folder)
    if config.against and "against" not in summary:
        return False
    return sorted(_list_ended(summary)) == sorted(trial.name for trial in plan.trials)


def _list_ended(summary: dict[str, Any]) -> list[str]:
    """The names of the trainings that a summary's figures come from, those that failed for good among them."""
    ended = [*summary["trainings"], *(record for record in summary["failed"] if not record["may_try_again"])]
    names = (*POINT, "seed")
    return [Point(**{name: record[name] for name in names if name in record}).key for record in ended]


def count_parameters(config: FinetuneConfig, start: StartModel, task: StagedTask) -> dict[str, tuple[int, int]]:
    """Trained and all parameters of each stage's model; makes the models, which checks that everything fits."""
    grid = config.grid
    for option, named in (("stage_lr", grid.stage_lr), ("stage_epochs", grid.stage_epochs)):
        if not named.keys() <= task.stages.keys():
            steps = ", ".join(task.stages)
            raise ConfigError(f"--grid.{option} is {named!r}; the steps of --task {config.task} are {steps}.")
    counts = {}
    for name, stage in task.stages.items():
        model = make_model(start, stage, config, config.seed)
        sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
        counts[name] = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    return counts
