"""An adapter's router: which rows it gets and which are left to the base, learned from a run's own texts.

Enters: the prepared domain text and general text (--replay.corpus) of a run. Leaves: RUN/router.safetensors with a
table of log-odds per adapter, see `routers_domext.Router`, and in its metadata the threshold of each, and what it keeps
and takes of held-out text.

A logistic regression on the words of a row and on pairs of neighbours, hashed, each row's counts divided by its length.
Rows of any length are learned from: beside each row there are pieces of it. One half of the held-out text gives the
threshold: the score that `KEPT_FRAC` of the domain's text reaches, or, where `LEFT_FRAC` of the general text stays
below a lower one, halfway down to that. Shares are measured on the other half.

General text that the base wrote (writing.py) is further from the domain than real text is. So rows of the domain of
which the base has written half stand beside it, and the threshold is never lowered.

The driver fits it in a thread: a run's workers start and train meanwhile, and its last evaluation asks for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import RunOptions
from domext_ray.errors import RunError, StorageError, name_file
from domext_ray.model.base import Base
from domext_ray.model.domext.configuration_domext import AdapterConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS, ROUTER_SKIPS, ROUTER_UNIT, Router, hash_pairs
from domext_ray.runs.attempts import Attempt
from domext_ray.runs.events import notify_driver
from domext_ray.runtime.machine import count_cpus
from domext_ray.storage import Place, parse_json
from domext_ray.text.corpus.manifest import Manifest, Split, flatten_lists, take_numbered
from domext_ray.text.data.draws import Purpose, hash_counters
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.run import Run
from domext_ray.training.writing import Writer

if TYPE_CHECKING:  # scikit-learn takes a second, of every job and every worker, and few of them fit a router
    from scipy.sparse import csr_matrix

ROUTERS = "router.safetensors"
KEPT_FRAC = 0.97
"""Share of held-out domain text that reaches the threshold, at least."""
LEFT_FRAC = 0.997
"""Share of held-out general text below the score down to which a threshold may go, to keep more of the domain's."""
TRAIN_ROWS, HELD_OUT_ROWS = 24_000, 4_000
"""Most rows of each text that a router is fitted on, and measured on."""
DOMAIN_SHARE = 4
"""Most rows of the domain that a router is fitted on, for each row of general text: more cost time and give nothing."""
LONGEST, SHORTEST_LEARNED, SHORTEST_MEASURED = 128, 6, 16
"""Words of a row that count at most; fewest words of a piece of it to learn from, and to measure on."""
REFILLED_ROWS = 1_000
"""Rows of the domain that the base writes in part."""
PIECES = 2
"""Pieces of each row to learn from; one to measure on."""
BREAK_SECONDS = 2.0
"""How long the end of a job waits for a fit that is broken off."""
_SCALE, _MAX_ITERATIONS = 10.0, 100  # of the features, at scikit-learn's own regularisation
_REMEDY = "delete it and run the training job again, which fits the router anew"
Rows = list[np.ndarray]


class _BrokenOff(Exception):
    """The run that a router is fitted for has ended."""


@dataclass(frozen=True)
class RouterRecord:
    """What is known of an adapter's router."""

    threshold: float  # log-odds per word from which a row is the adapter's
    kept: float  # share of held-out domain text that it gives the adapter, 0 to 1
    taken: float  # share of held-out general text that it gives the adapter, 0 to 1
    written: bool = False  # the general text is the base's own: what users' general text is like, nobody has told it


def fit_router(
    domain: Manifest,
    general: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    num_words: int,
    seed: int,
    writer: Base | None = None,
    listen: Callable[[], None] = lambda: None,
) -> tuple[Tensor, RouterRecord]:
    """Learn to tell a domain's text from general text, which `writer`, the base, may have written.

    Special words do not count, nor do those from `num_words` on, the new ones: the general text may not have them.
    `listen` is called again and again; what it raises breaks the fit off. Returns the table, int32 [num_words +
    ROUTER_PAIRS], and what it reaches on held-out text.
    """
    draw = np.random.default_rng(seed)
    others = _read_rows(general, "train", TRAIN_ROWS, seed)
    if writer is not None:  # which does not have the new words
        known = [row[row < num_words] for row in _read_rows(domain, "train", REFILLED_ROWS, seed)]
        others += Writer(writer).refill_rows([row for row in known if len(row)], listen)
    listen()
    own = _read_rows(domain, "train", min(TRAIN_ROWS, DOMAIN_SHARE * len(others)), seed)
    own, others = (_add_pieces(whole, draw, PIECES, SHORTEST_LEARNED) for whole in (own, others))
    counts = ~np.isin(np.arange(num_words), tokenizer.all_special_ids)
    router = Router(AdapterConfig(router_words=num_words))
    router.weight.copy_(_fit_table(own, others, counts))

    halves = []
    for manifest in (domain, general):
        held_out = _read_rows(manifest, "held_out", HELD_OUT_ROWS, seed)
        for rows in (held_out[::2], held_out[1::2] or held_out):
            halves.append(_score(router, _add_pieces(rows, draw, 1, SHORTEST_MEASURED), tokenizer.pad_token_id))
    threshold = choose_threshold(halves[0], halves[2] if writer is None else None)
    kept, taken = (float((scores >= threshold).mean()) for scores in (halves[1], halves[3]))
    return router.weight, RouterRecord(threshold, kept, taken, written=writer is not None)


def choose_threshold(domain: np.ndarray, general: np.ndarray | None) -> float:
    """Choose the log-odds per word, finite, from which a row is the domain's, by scores, float64 [R], of both texts.

    Rows without words have minus infinity. Without general text the domain's alone decides.
    """
    keeps = np.quantile(domain, 1 - KEPT_FRAC, method="lower")
    if general is None:
        return _floor(keeps)
    leaves = np.quantile(general, LEFT_FRAC, method="higher")
    return _floor(keeps if leaves >= keeps or not np.isfinite(leaves) else (leaves + keeps) / 2)


def _read_rows(manifest: Manifest, split: Split, most: int, seed: int) -> Rows:
    """Rows of a split, each of `LONGEST` words at most: one of each of `most` equal stretches, drawn by the seed."""
    total = manifest.num_rows(split)
    bounds = np.arange(min(total, most) + 1, dtype=np.int64) * total // min(total, most)
    draws = hash_counters(seed, Purpose.ROUTER_ROWS, np.arange(len(bounds) - 1))
    numbers = bounds[:-1] + (draws % np.diff(bounds).astype(np.uint64)).astype(np.int64)
    values, lengths = flatten_lists(take_numbered(manifest.shards(split), numbers), "input_ids")
    return [row[:LONGEST].astype(np.int64) for row in np.split(values, np.cumsum(lengths)[:-1])]


def _add_pieces(rows: Rows, draw: np.random.Generator, number: int, shortest: int) -> Rows:
    """Rows, and pieces of them whose lengths are even on a logarithmic scale."""
    pieces = []
    for row in rows * number:
        size = min(len(row), int(np.exp(draw.uniform(np.log(shortest), np.log(max(shortest, len(row)) + 1)))))
        first = draw.integers(0, len(row) - size + 1)
        pieces.append(row[first : first + size])
    return [*rows, *pieces]


def _count_words(rows: Rows, counts: np.ndarray) -> csr_matrix:
    """How often each row has each word and each hashed pair, by the number of its words: [R, V + ROUTER_PAIRS]."""
    from scipy.sparse import csr_matrix

    columns, numbers = [], []
    for row in rows:
        known = row < len(counts)
        known[known] = counts[row[known]]
        both = known[:-1] & known[1:]
        columns.append(np.concatenate([row[known], len(counts) + hash_pairs(row[:-1], row[1:])[both]]))
        numbers.append(max(1, known.sum()))
    sizes = [*map(len, columns)]
    values, ends = np.repeat(np.float32(_SCALE) / np.array(numbers, dtype=np.float32), sizes), np.cumsum([0, *sizes])
    return csr_matrix((values, np.concatenate(columns), ends), shape=(len(rows), len(counts) + ROUTER_PAIRS))


def _fit_table(domain: Rows, general: Rows, counts: np.ndarray) -> Tensor:
    """Fit the log-odds; each word has the constant in it, for they are averaged."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    labels = np.repeat([1, 0], [len(domain), len(general)])
    model = LogisticRegression(class_weight="balanced", max_iter=_MAX_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the last digits decide no row
        model.fit(_count_words([*domain, *general], counts), labels)
    table = model.coef_[0] * _SCALE
    table[: len(counts)] += model.intercept_[0]
    table = np.round(table / ROUTER_UNIT).astype(np.int32)
    table[: len(counts)][~counts] = ROUTER_SKIPS
    return torch.from_numpy(table)


def _score(router: Router, rows: Rows, pad_id: int) -> np.ndarray:
    padded = nn.utils.rnn.pad_sequence([*map(torch.from_numpy, rows)], batch_first=True, padding_value=pad_id)
    return torch.cat([*map(router, padded.split(256))]).numpy()


def _floor(score: float) -> float:
    """A score, rounded down to digits that one can read; a finite one, where rows have no words."""
    return float(np.floor(np.nan_to_num(score, neginf=0.0) * 1e4) / 1e4)


def wants_router(config: RunOptions) -> bool:
    """Whether a run's adapter gets a router: it has general text, and a base that other rows are left to."""
    return config.method.has_adapter and bool(config.replay.corpus) and config.base != "none"


@contextlib.contextmanager
def fit_beside(run: Run) -> Iterator[Run]:
    """Fit the router of a run's adapter in a thread while what is inside trains the run, unless it is there.

    It yields the run as its workers get it. What keeps the router from being fitted shuts the workers out, and is
    raised at the end.
    """
    if not wants_router(run.config) or run.config.method.adapter in read_records(run.paths.run):
        get_or_train_routers(run)
        yield run
        return
    is_over, failures = threading.Event(), list[Exception]()

    def listen() -> None:
        if is_over.is_set():
            raise _BrokenOff

    def fit() -> None:
        torch.get_num_threads()  # which sets those of a new thread, and would do so later
        try:
            with threadpool_limits(max(1, count_cpus() // 2)):  # workers start beside it
                get_or_train_routers(run, listen)
        except _BrokenOff:
            pass
        except Exception as error:
            failures.append(error)
            assert isinstance(run.paths.run.fence, Attempt), "the run is held"
            with contextlib.suppress(RunError, StorageError, OSError):  # another job has the run, or it is gone
                run.paths.run.fence.shut_out_workers()

    thread = threading.Thread(target=fit, name="router", daemon=True)
    thread.start()
    try:
        yield replace(run, awaits_router=True)
        thread.join()
    finally:
        is_over.set()
        thread.join(BREAK_SECONDS)
        if failures:
            raise failures[0] from None


def get_or_train_routers(run: Run, listen: Callable[[], None] = lambda: None) -> None:
    """Fit the router of a run's adapter, where it has one and general text, beside those of the run it starts from.

    A router depends on the run's texts and seed alone. A run that goes on has it already. Without a base there is none:
    no row is left to it.
    """
    config, base, run_dir = run.config, run.spec.base, run.paths.run
    known = read_routers(run_dir)
    routers = {**(read_routers(run.start.run_dir) if run.start else {}), **known}
    if wants_router(config) and config.method.adapter not in known:
        assert base is not None
        domain, general, *_ = run.inputs.texts[0]
        writer = base if config.replay.is_written else None
        tokenizer = load_tokenizer(run.inputs.tokenizer.local())
        fitted = fit_router(domain, general, tokenizer, base.config.vocab_size, config.seed, writer, listen)
        routers[config.method.adapter] = fitted
        notify_driver(run_dir, f"router: {describe_router(config, asdict(fitted[1]))}")
    if routers:
        save_routers(run_dir, routers)


def save_routers(run_dir: Place, routers: Mapping[str, tuple[Tensor, RouterRecord]]) -> None:
    """Write a run's routers, tables and records by adapter, into its directory."""
    records = {name: json.dumps(asdict(record)) for name, (_, record) in routers.items()}
    (run_dir / ROUTERS).put(save({name: table for name, (table, _) in routers.items()}, records))


def read_records(run_dir: Place) -> dict[str, RouterRecord]:
    """Return what is known of a run's routers, by adapter; empty where it has none; see `read_routers`."""
    return {name: record for name, (_, record) in read_routers(run_dir).items()}


def read_routers(run_dir: Place) -> dict[str, tuple[Tensor, RouterRecord]]:
    """Return the tables and records of a run's routers, by adapter; empty where it has none."""
    path = run_dir / ROUTERS
    if not path.is_file():
        return {}
    try:
        with name_file(path), safe_open(path.local(), "pt") as file:
            records = {name: RouterRecord(**parse_json(text)) for name, text in file.metadata().items()}
            return {name: (file.get_tensor(name), record) for name, record in records.items()}
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); {_REMEDY}.") from error


def attach_routers(model: DomextForMaskedLM, run_dir: Place) -> None:
    """Give the adapters of a run's model their routers, where the run has some."""
    for name, (table, record) in read_routers(run_dir).items():
        try:
            model.bert.set_router(name, table, record.threshold)
        except ValueError as error:
            raise RunError(f"{run_dir / ROUTERS} does not fit the run's model ({error}); {_REMEDY}.") from error


def describe_router(config: RunOptions, record: Mapping[str, float] | None) -> str:
    """Return the sentence of a page or a card about a run's router; empty for a method without an adapter.

    `record` has the values of its `RouterRecord`; None: it has none, or none yet.
    """
    if not config.method.has_adapter:
        return ""
    if record is None:
        return "" if config.replay.corpus else "none, as no general text was given (--replay.corpus)"
    general = "held-out text that the base wrote" if record["written"] else "held-out general text"
    return (
        f"gives the adapter {record['kept']:.1%} of held-out domain text and {record['taken']:.1%} of {general}, at "
        f"the threshold {record['threshold']:.2f}" + ("; fitted without general text" if record["written"] else "")
    )
