"""Everything that a GPU runs, on a device that is not the CPU: nothing mixes the two; who waits or sends is in a table.

What it shows is ours alone. DeepSpeed has waits of its own: at ZeRO 1 to 3 it looks at the gradient's norm and at its
overflow once per step, and clips by a norm that it has on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from card_runs import (
    Waits,
    run_bank,
    run_family,
    run_fill_mask,
    run_fused,
    run_objective,
    run_row,
    run_varlen,
    run_vectors,
    save_start,
)
from forked import launch
from method_runs import Places, make_places, try_to
from methods import ROWS, find_row
from tiny_layouts import TINY_LAYOUTS

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.families.registry import FAMILIES
from domext_ray.model.domext import layers_domext

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOST, CARD, SENT = "to host", "to card", "sent"
_BATCH = "training/step.py", "_send", SENT
_STEP = {
    _BATCH: (2, "a micro batch, all of it"),
    ("training/step.py", "_accumulate_gradients", SENT): (1, "factors of the losses"),
    ("training/step.py", "launch_step", HOST): (1, "its figures, which are waited for when the next step is launched"),
}
_ROWS = {
    ("model/domext/modeling_domext.py", "find_rows", SENT): (5, "the rows of each adapter"),
    ("models/mixed_adapters.py", "_score", SENT): (4, "the rows of each head"),
}
_BILSTM = {
    ("model/domext/heads_domext.py", "_read", HOST): (2, "torch packs rows by lengths on the host"),
    ("model/domext/heads_domext.py", "_read", CARD): (2, "the order of packed rows"),
}
WAITS = {
    "step": {**_STEP, **_BILSTM},
    "evaluation": {
        _BATCH: (1, "a batch"),
        ("training/evaluate.py", "evaluate", HOST): (1, "the sums over a set, at its end"),
    },
    "prediction": {
        _BATCH: (2, "a batch; there is one, or one for each of two stages"),
        ("models/task_model.py", "_run_batch", HOST): (4, "outputs, which are decoded on the host"),
        ("models/text_embedding.py", "_run", HOST): (1, "vectors of terms, which are ranked on the host"),
        ("inference/fill_mask.py", "_fill", HOST): (2, "probabilities and ids"),
        ("model/domext/heads_domext.py", "_read", HOST): (2, "as in training"),
        ("model/domext/heads_domext.py", "_read", CARD): (1, "as in training"),
    },
    "vectors": {_BATCH: (1, "a batch"), ("models/text_embedding.py", "_run", HOST): (1, "the vectors")},
    "mixed": _ROWS,
    "routed": {
        **_ROWS,
        ("model/domext/routers_domext.py", "forward", HOST): (3, "each router's sums, which name the rows"),
    },
}
"""By what runs: file, function and what -> how often at most, in a step of two micro batches or one batch; and why."""

STARTS = sorted({row.after for row in ROWS if row.after})


# --- faults that are planted ---


def ask_for_a_value(states: torch.Tensor) -> torch.Tensor:
    return states if states.sum().item() else -states


def use_an_index_of_the_cpu(states: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states))]


def take_by_a_mask(states: torch.Tensor) -> torch.Tensor:
    return states + states[states > 0].sum()


def send_more(states: torch.Tensor) -> torch.Tensor:
    return states + torch.zeros(states.shape[-1]).to(states.device, non_blocking=True)


FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "value": (ask_for_a_value, "ask_for_a_value: "),
    "index": (use_an_index_of_the_cpu, "MixedDevicesError"),
    "mask": (take_by_a_mask, "take_by_a_mask: index"),
    "copy": (send_more, "send_more: sent"),
}


def run_with_fault(fault: Callable[[torch.Tensor], torch.Tensor], places: Places) -> dict[str, Waits]:
    """A step of a model of which one layer does what it must not."""
    plain = layers_domext.AdapterUnits.forward

    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return fault(plain(module, hidden_states))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_domext.AdapterUnits, "forward", forward)
        return run_row(find_row("AF"), places)


# --- what runs, in a process of its own ---


def list_runs(places: Places, layouts: dict[str, Places], root: Path) -> dict[str, Callable[[], dict[str, Waits]]]:
    """Everything that is run, by name."""
    base = places.bert
    return {
        **{row.slug: lambda row=row: run_row(row, places) for row in ROWS},
        "af-in-fp32": lambda: run_row(find_row("AF"), places, "fp32"),
        **{kind: lambda layout=layout: run_row(find_row("AF"), layout) for kind, layout in layouts.items()},
        "crop": lambda: run_objective(ObjectiveConfig(kind="infonce", views="crop", group_rows=4), places),
        "packed": lambda: run_objective(ObjectiveConfig(), places, packed=True),
        "varlen": lambda: run_varlen(lambda: run_row(find_row("AF"), places, dropout=0.0)),
        "varlen-keeping": lambda: run_varlen(
            lambda: run_row(find_row("AF in the upper layer, keeping the base's predictions"), places, dropout=0.0)
        ),
        "varlen-exbert": lambda: run_varlen(lambda: run_row(find_row("exBERT"), places, dropout=0.0)),
        "varlen-packed": lambda: run_varlen(
            lambda: run_objective(ObjectiveConfig(), layouts["modernbert"], packed=True, dropout=0.0)
        ),
        "fused": lambda: run_fused(lambda: run_row(find_row("AF"), layouts["modernbert"])),
        "varlen-ner": lambda: run_varlen(lambda: run_family("ner", base)),
        **{family: lambda family=family: run_family(family, base) for family in FAMILIES},
        "bilstm": lambda: run_family("ner", base, head_bilstm=8),
        "bank": lambda: run_bank(base, root),
        "vectors": lambda: run_vectors(base),
        "fill-mask": lambda: run_fill_mask(base),
        **{f"planted-{name}": lambda fault=fault: run_with_fault(fault[0], places) for name, fault in FAULTS.items()},
    }


NAMES = list(list_runs(Places(Path(), Path(), Path()), dict.fromkeys(TINY_LAYOUTS, None), Path()))  # type: ignore[arg-type]
PLANTED = [name for name in NAMES if name.startswith("planted-")]


def measure(_: int, names: set[str], places: Places, root: Path) -> dict[str, Any]:
    layouts = {}
    for kind in TINY_LAYOUTS:
        base = TINY_LAYOUTS[kind].save(root / kind)
        (root / f"runs-{kind}").mkdir()
        layouts[kind] = make_places(root / f"runs-{kind}", base, base, ["AF"])
    for name in STARTS:
        save_start(find_row(name), places)
    runs = list_runs(places, layouts, root)
    return {name: try_to(run) for name, run in runs.items() if name in names}


@pytest.fixture(scope="module")
def results(
    tiny_base_folder: Path,
    tiny_roberta_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("devices")
    (root / "runs").mkdir()
    places = make_places(root / "runs", tiny_base_folder, tiny_roberta_folder)
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params["name"] for item in own if hasattr(item, "callspec")}
    if any(not hasattr(item, "callspec") for item in own):
        asked = {*NAMES}
    (found,) = launch(measure, (asked, places, root), 1, root)
    return found


def find_faults(result: dict[str, Waits] | str) -> list[str]:
    """What a run does that the table does not allow, a sentence each."""
    if isinstance(result, str):
        return [result]
    faults = []
    for what, waits in result.items():
        for wait, count in waits.items():
            most, _ = WAITS[what].get(wait.place, (0, ""))
            if count > most:
                faults.append(f"{wait.file}:{wait.line}, {wait.function}: {wait.what}, {count} times per {what}")
    return faults


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PLANTED])
def test_nothing_mixes_devices_and_nothing_else_waits(name: str, results: dict[str, Any]) -> None:
    assert find_faults(results[name]) == []


def test_a_planted_fault_is_found(results: dict[str, Any]) -> None:
    for name, (_, says) in FAULTS.items():
        found = find_faults(results[f"planted-{name}"])
        assert found and says in found[0], name


def test_every_entry_of_the_table_happens(results: dict[str, Any]) -> None:
    made = [result for result in results.values() if isinstance(result, dict)]
    seen = {(what, wait.place) for result in made for what, waits in result.items() for wait in waits}
    assert [entry for what, entries in WAITS.items() for entry in entries if (what, entry) not in seen] == []
