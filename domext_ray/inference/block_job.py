"""What `domext predict` and `domext embed` share: rows in blocks -> an output folder that the same command completes.

Enters: a `BlockPlan`, and what each worker does with a block. Leaves, in --output:

    predictions/part-NNNNNN.*   one row per input row, in the input's order
    malformed.jsonl             rows that could not be read: file, line and reason
    summary.json                rows and seconds; written last
    config.yaml, run.json  what the output was made from
    .blocks/                    what is done, for a job that goes on

The same command goes on with the blocks that are missing (blocks.py). Another model, another input or other options are
refused, since parts of two jobs would make no whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TextIO, TypeVar

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.inference.blocks import PARTS, RECORDS, BlockFolder, BlockRecord, MakeWork, run_blocks
from domext_ray.inference.input_plan import InputPlan
from domext_ray.inference.input_rows import TEXT_FIELD, InputRow, RowError
from domext_ray.inference.labelled_input import LabelledInput
from domext_ray.inference.submission import SubmissionInput
from domext_ray.runs.run_directory import RUN, check_identity, lock_run, write_config, write_run
from domext_ray.runtime.ray_cluster import resolve_gpu, start_ray
from domext_ray.storage import new_file
from domext_ray.training.pretrain import check_shared_storage

SUMMARY, MALFORMED = "summary.json", "malformed.jsonl"

ConfigT = TypeVar("ConfigT", PredictConfig, EmbedConfig)


@dataclass(frozen=True)
class BlockPlan(Generic[ConfigT]):
    """A job on blocks, checked.

    Args:
        config: what was asked for, its devices settled as far as they are known.
        input: the rows.
        folder: the output.
        identity: what makes it this job.
    """

    verb: ClassVar[str]
    """What the progress line calls the work."""

    config: ConfigT
    input: InputPlan | LabelledInput | SubmissionInput
    folder: Path
    identity: dict[str, Any]

    @property
    def suffix(self) -> str:
        """Ending of the parts' names."""
        return f".{self.config.format}"

    @property
    def blocks(self) -> BlockFolder:
        """The files of the blocks."""
        return BlockFolder(self.folder, self.suffix)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return (self.folder / SUMMARY).is_file() and all(self.blocks.is_done(each.number) for each in self.input.blocks)

    def read_records(self) -> Iterator[BlockRecord]:
        """Yield what was counted in each block, in order; all blocks are done."""
        yield from (self.blocks.read(each.number) for each in self.input.blocks)


PlanT = TypeVar("PlanT", bound=BlockPlan[Any])


def resolve_output(config: PredictConfig | EmbedConfig, identity: Mapping[str, Any]) -> Path:
    """Return the folder of an output, which is empty or the job's own.

    Raises:
        RunError: it belongs to another job.
    """
    folder = Path(config.output).expanduser().resolve()
    with _name_output():
        check_identity(folder, identity)
    if (folder / PARTS).exists() and not (folder / RUN).exists():
        raise RunError(f"{folder} holds {PARTS} of something else; give another --output.")
    return folder


def run_block_job(
    plan: PlanT, make_work: Callable[[PlanT], MakeWork], finish: Callable[[PlanT, int, float], dict[str, Any]]
) -> dict[str, Any]:
    """Work on the blocks that are missing.

    Args:
        plan: the job.
        make_work: returns what each worker is sent.
        finish: is given the plan, the rows that were worked on now and the seconds that it took; writes the summary.

    Returns:
        The summary.

    Raises:
        DomextError: any mistake of the user's.
    """
    start_ray()
    plan = replace(plan, config=resolve_gpu(plan.config))
    with _name_output(), lock_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_run(plan.folder, identity=plan.identity)
        check_shared_storage(plan.folder)
        plan.blocks.make()
        started = time.perf_counter()
        num_rows = run_blocks(plan.input.blocks, make_work(plan), plan.blocks, plan.config.scale, plan.verb)
        return finish(plan, num_rows, time.perf_counter() - started)


@contextlib.contextmanager
def _name_output() -> Iterator[None]:
    """Let messages about a run's directory speak of --output."""
    try:
        yield
    except RunError as error:
        if type(error) is not RunError:
            raise
        said = str(error).replace("--run.name", "--output").replace("--run.dir", "--output")
        raise RunError(said.replace("the run directory", "the output")) from error


def sort_out(
    rows: Sequence[InputRow], make_example: Callable[[InputRow], Any], *, is_strict: bool
) -> tuple[list[InputRow], list[Any], list[dict[str, Any]]]:
    """Separate rows that can be used from those that cannot.

    Args:
        rows: of a block.
        make_example: called for rows with text; raises a RowError for one that cannot be used.
        is_strict: refuse the first malformed row.

    Returns:
        The rows that can be used, the examples of those that are not blank, and file, line and reason of the others.

    Raises:
        CorpusError: a row is malformed, and `is_strict`.
    """
    kept, examples, malformed = list[InputRow](), list[Any](), list[dict[str, Any]]()
    for row in rows:
        try:
            if row.fault:
                raise RowError(row.fault)
            if not is_blank(row):
                examples.append(make_example(row))
            kept.append(row)
        except RowError as error:
            if is_strict:
                raise CorpusError(f"{row.path}:{row.line}: the row {error}; mend it, or leave out --strict.") from error
            malformed.append({"file": row.path, "line": row.line, "reason": f"the row {error}"})
    return kept, examples, malformed


def is_blank(row: InputRow) -> bool:
    """Whether a row's text is nothing but white space: there is nothing to compute."""
    if row.example is not None:
        return False
    text = row.values.get(TEXT_FIELD)
    return isinstance(text, str) and not text.strip()


def gather_counts(plan: BlockPlan[Any]) -> dict[str, Any]:
    """Write malformed.jsonl; return "rows", "empty", "malformed", "first_malformed" and "cases" of all blocks.

    Raises:
        CorpusError: no row at all can be used; the output is as if the job had not been.
    """
    counts, cases, first = Counter[str](), Counter[str](), ""
    with new_file(plan.folder / MALFORMED) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in plan.read_records():
            counts.update({"rows": record["rows"], "empty": record["empty"], "malformed": len(record["malformed"])})
            cases.update(record["cases"])
            for each in record["malformed"][:1]:
                first = first or f"{each['file']}:{each['line']}: {each['reason']}"
            write_lines(file, record["malformed"])
    if not counts["rows"] and counts["malformed"]:
        _forget(plan.folder)
        raise CorpusError(
            f"none of the {counts['malformed']:,} rows of --input {plan.config.input!r} can be used ({first}); set "
            "--field, or mend the file."
        )
    return {**counts, "first_malformed": first, "cases": dict(cases)}


def measure_rate(num_rows: int, seconds: float) -> dict[str, Any]:
    """Return the summary's part on one start."""
    return {"rows_now": num_rows, "seconds": round(seconds, 3), "rows_per_second": round(num_rows / seconds, 3)}


def _forget(folder: Path) -> None:
    """Leave nothing that would make the same output, with other options, look like another job."""
    for name in (PARTS, RECORDS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (RUN, MALFORMED):
        (folder / name).unlink(missing_ok=True)


def write_lines(file: TextIO, records: Sequence[Any]) -> None:
    """Write values as JSON, a line each."""
    for each in records:
        file.write(json.dumps(each, ensure_ascii=False) + "\n")


def describe_plan(plan: BlockPlan[Any], model: str) -> str:
    """Return what a dry run prints.

    Args:
        plan: the job.
        model: what is said of the model.
    """
    blocks = plan.input.blocks
    done = sum(plan.blocks.is_done(each.number) for each in blocks)
    return "\n".join(
        [
            f"model      {model}",
            f"input      {plan.input.describe()}",
            f"blocks     {len(blocks):,} of up to {plan.config.block_rows:,} rows; {done:,} are done",
            f"output     {plan.folder}",
        ]
    )


def describe_losses(summary: Mapping[str, Any], folder: Path, lacking: str) -> list[str]:
    """Return the sentences about rows without text, those that are malformed, and those that were cut or are odd.

    Args:
        summary: of the job.
        folder: the output.
        lacking: what follows "rows have no text, so ".
    """
    lines = [f"{summary['empty']:,} rows have no text, so {lacking}."] if summary["empty"] else []
    if summary["malformed"]:
        lines.append(
            f"{summary['malformed']:,} rows are malformed and left out; {folder / MALFORMED} names them, the first is "
            f"{summary['first_malformed']}."
        )
    return lines + [f"{number:,} {what}." for what, number in summary["cases"].items()]
