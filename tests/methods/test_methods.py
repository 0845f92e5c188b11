"""The behaviour matrix: methods and combinations of methods.py, each against the same list of promises.

Rows of `QUICK` on BERT and RoBERTa are of the default tier, and so is ZeRO stage 3; all else is slow. `python
tests/methods/test_methods.py` runs all of it and prints a table of methods and proofs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import launch
from lone_engine import measure_distance
from method_runs import CUT, STEPS, Places, build, draw_batches, make_places, measure_rows
from methods import ALL_MATRICES, QUICK, ROWS, Row, find_row
from tiny_layouts import TINY_LAYOUTS
from torch import Tensor
from transformers import AutoModelForMaskedLM

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import Base, hash_tensors, load_base
from domext_ray.model.budget import ParameterCounts, solve_budget
from domext_ray.model.build import Extensions, describe_extensions, detach
from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import UNKNOWN_WORD, ModelSpec, build_base
from domext_ray.pretraining.plan import size_model
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.evaluate import read_probe
from domext_ray.training.start import rebuild_run
from domext_ray.training.step import StepFigures

pytestmark = pytest.mark.timeout(900)  # processes that import torch and DeepSpeed: minutes on a busy machine
CPU = torch.device("cpu")
NUM_SHIPPED_WORDS = 2000
slow = pytest.mark.slow
each_row = pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.name in QUICK else slow, id=row.slug) for row in ROWS]
)
LAYOUTS = ["bert", *(pytest.param(kind, marks=slow) for kind in ("modernbert", "distilbert"))]
"""Bases: BERT and, where a row says so, RoBERTa; or one of another layout for all rows."""


@pytest.fixture(scope="module", params=LAYOUTS)
def places(
    request: pytest.FixtureRequest,
    tiny_base_folder: Path,
    tiny_roberta_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Places:
    """Of the rows that are asked for on this layout."""
    root, kind = tmp_path_factory.mktemp("methods"), request.param
    own = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    names = {params["row"].name for params in own if params.get("places") == kind and "row" in params}
    if kind == "bert":
        return make_places(root, tiny_base_folder, tiny_roberta_folder, names)
    base = TINY_LAYOUTS[kind].save(root / kind)
    return make_places(root, base, base, names)


@pytest.fixture(scope="module")
def runs(places: Places) -> dict[str, Any]:
    """What every row's own runs gave; afterwards each run directory holds the row's last checkpoint."""
    (places.root / "alone").mkdir()
    first, second = launch(measure_rows, (places,), 2, places.root / "alone", alone=True)
    results = first | second
    for row in (candidate for candidate in places.rows if lacks(places, candidate)):
        assert (
            "ConfigError: --method.trains is" in results[row.slug] or "--objective.next_sentence" in results[row.slug]
        )
        results[row.slug] = None
    return results


def lacks(places: Places, row: Row) -> bool:
    """Whether a row's base does not have what the row trains: biases, or segment types for pairs."""
    config = load_base(str(places.base_of(row))).config
    trains_biases = row.make_method().trains == "biases"
    return (row.pairs and config.type_vocab_size < 2) or (trains_biases and not config.has_biases)


def make_sharded(*stages: int) -> Any:
    """A fixture: what rank 0 of two workers saw at some ZeRO stages, by row and stage."""

    @pytest.fixture(scope="module")
    def results(places: Places, runs: dict[str, Any]) -> dict[str, Any]:
        folder = places.root / f"zero-{stages}"
        folder.mkdir()
        ranks = launch(measure_rows, (places, stages), 2, folder)
        failures = {key: result for key, result in ranks[1].items() if isinstance(result, str)}
        return ranks[0] | failures

    return results


sharded, sharded_slow = make_sharded(3), make_sharded(0, 1, 2)


def take(results: dict[str, Any], key: str) -> Any:
    """Return what a row's run gave; its failure is that of the test."""
    if results[key] is None:
        pytest.skip("the base does not have what this row trains, and says so")
    if isinstance(results[key], str):
        pytest.fail(results[key], pytrace=False)
    return results[key]


def list_losses(figures: list[StepFigures]) -> list[float]:
    return [sum(step.losses.values()) for step in figures]


@torch.no_grad()
def score(model: Any, row: Row, places: Places, *, embedded: bool = False) -> Tensor:
    """Logits of the tokens of a padded batch of the row's text, by their ids or by the model's embeddings of these."""
    batch = draw_batches(row, places, STEPS)[0][0]
    assert batch.attention_mask is not None
    given = (
        {"inputs_embeds": model.get_input_embeddings()(batch.input_ids)} if embedded else {"input_ids": batch.input_ids}
    )
    return model.eval()(**given, attention_mask=batch.attention_mask)[0][batch.attention_mask.bool()]


# --- the matrix -----------------------------------------------------------------------------------------------------


@each_row
def test_trains_what_it_says_and_leaves_the_rest(row: Row, places: Places, runs: dict[str, Any]) -> None:
    run = take(runs, row.slug)
    expected = {name for name in run["names"] if row.trains(name)}
    assert run["changed"] == expected
    base = load_base(str(places.base_of(row)), next_sentence=row.pairs)
    assert (run["sha256"] == base.sha256) == keeps_base(row)


@each_row
def test_gradients_are_where_it_trains(row: Row, runs: dict[str, Any]) -> None:
    gradients = take(runs, row.slug)["gradients"]
    assert {name for name, grad in gradients.items() if grad is not None} == {
        name for name in gradients if row.trains(name)
    }
    assert [name for name, grad in gradients.items() if grad == 0.0] == []


@each_row
def test_counts_are_those_of_the_tensors(row: Row, places: Places, runs: dict[str, Any]) -> None:
    take(runs, row.slug)
    built = build(row, places)
    counts = built.spec.counts
    params = dict(built.model.named_parameters())
    assert counts.total == sum(param.numel() for param in params.values())
    assert counts.trainable == sum(param.numel() for param in params.values() if param.requires_grad)
    assert counts.encoder == sum(param.numel() for name, param in params.items() if name.startswith("bert."))


@each_row
def test_starts_at_the_base(row: Row, places: Places, runs: dict[str, Any]) -> None:
    """Or, where it goes on from another run, at that run's model."""
    take(runs, row.slug)
    built = build(row, places)
    known = row if not row.new_words or row.after else replace(row, new_words=False)  # rows without new words
    if row.after:
        reference = rebuild_run(Place(places.run_of(find_row(row.after)))).model
    else:
        reference = build_base(built.base, CPU, causal=row.causal)
    expected = score(reference, known, places)
    found = score(built.model, known, places)[..., : expected.shape[-1]]
    distance = (found - expected).abs().max().item()
    assert torch.equal(found, expected) if row.exact_start else 1e-4 < distance < 10.0


@each_row
def test_the_base_comes_back_from_a_checkpoint(row: Row, places: Places, runs: dict[str, Any]) -> None:
    take(runs, row.slug)
    run = rebuild_run(Place(places.run_of(row)))
    assert run.spec.base is not None and run.step == STEPS
    names = {name: name for name in run.spec.base.original_names}
    tensors = detach(run.model, names)
    assert (hash_tensors(tensors) == run.spec.base.sha256) == keeps_base(row)
    assert all(
        torch.equal(tensor, run.spec.base.tensors[name]) for name, tensor in tensors.items() if not row.trains(name)
    )


@pytest.mark.usefixtures("own_modules")
@each_row
def test_an_export_loads_with_transformers(row: Row, places: Places, runs: dict[str, Any], tmp_path: Path) -> None:
    take(runs, row.slug)
    folder = export_run(Place(places.run_of(row)), Place(tmp_path / f"export_{row.slug.replace('-', '_')}"))
    assert bool(list(Path(folder).glob("*.py"))) != row.plain_export
    exported = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=not row.plain_export)
    assert type(exported) is not DomextForMaskedLM
    expected = score(rebuild_run(Place(places.run_of(row))).model, row, places)
    found = score(exported, row, places)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(score(exported, row, places, embedded=True), found)
    assert exported.resize_token_embeddings(found.shape[-1]) is exported.get_input_embeddings()


@each_row
def test_resume_is_exact(row: Row, runs: dict[str, Any]) -> None:
    run = take(runs, row.slug)
    (going_on, expected), (again, found) = run["straight"], run["resumed"]
    assert len(again) == STEPS - CUT and again == going_on
    assert measure_distance(found, expected) == 0.0


@pytest.mark.slow
@each_row
def test_zero_3_on_two_workers(row: Row, runs: dict[str, Any], sharded: dict[str, Any]) -> None:
    check_sharded(row, 3, runs, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@each_row
def test_zero_0_to_2_on_two_workers(row: Row, stage: int, runs: dict[str, Any], sharded_slow: dict[str, Any]) -> None:
    check_sharded(row, stage, runs, sharded_slow)


def check_sharded(row: Row, stage: int, runs: dict[str, Any], sharded: dict[str, Any]) -> None:
    expected_figures, expected = take(runs, row.slug)["reference"]
    figures, found = take(sharded, f"{row.slug}/{stage}")
    assert list_losses(figures) == pytest.approx(list_losses(expected_figures), abs=1e-4)
    assert [step.grad_norm for step in figures] == pytest.approx(
        [step.grad_norm for step in expected_figures], rel=1e-3
    )
    assert measure_distance(found, expected) < 1e-4


@each_row
def test_bf16(row: Row, runs: dict[str, Any]) -> None:
    run = take(runs, row.slug)
    losses, expected = list_losses(run["bf16"]), list_losses(run["reference"][0])
    assert all(step.finite for step in run["bf16"])
    assert losses == pytest.approx(expected, abs=0.1) and losses != pytest.approx(expected, abs=1e-6)
    assert set(run["bf16_frozen"].values()) <= {"torch.bfloat16"} and run["bf16_kept"]
    assert bool(run["bf16_frozen"]) == any(not row.trains(name) for name in run["bf16_frozen"])


def keeps_base(row: Row) -> bool:
    """Whether nothing of the base trains."""
    return row.make_method().trains in ("extensions", "adapter")


# --- budgets --------------------------------------------------------------------------------------------------------

MODULES, UNITS, ADAPTER = (
    {"module_hidden_size": 84, "module_ffn_size": 340},
    {"ffn_units": 512},
    {"bottleneck_size": 64},
)
SIZED: dict[str, dict[str, Any]] = {
    "fl_tuning": UNITS,
    "af": {"heads": 1, **UNITS},
    "bottleneck": ADAPTER,
    "bottleneck_without_norms": {**ADAPTER, "bottleneck_norms": False},
    "bottleneck_upper_half": {**ADAPTER, "layers": "2-3"},
    "bottleneck_variants": {**ADAPTER, "bottleneck_place": "output", "bottleneck_layer_norm": True},
    "exbert": MODULES,
    "lora": {"lora_rank": 16, "lora_targets": ("query", "value")},
    "lora_all_matrices": {"lora_rank": 16, "lora_targets": ALL_MATRICES},
    "af_and_bottleneck": {"heads": 1, **UNITS, **ADAPTER},
    "exbert_and_bottleneck": {**MODULES, **ADAPTER},
    "lora_and_units": {"lora_rank": 16, "ffn_units": 100},
}
# A rank is a coarse step where all matrices of a small base have it; in two matrices a layer it is soon their width.
REFUSED = {
    ("lora_all_matrices", "general-mini", 0.05): "the nearest size of this method trains 4.88%",
    ("lora", "general-mini", 0.17): "which takes a rank of 269 in matrices of width 256",
    ("lora", "general-mini", 0.4): "which takes a rank of 877 in matrices of width 256",
    ("lora", "bert-base", 0.4): "which takes a rank of 1980 in matrices of width 768",
}


@cache
def load_shipped() -> Base:
    return load_base("general-mini")


def solve(base: Base, method: dict[str, Any], budget: float, num_new_words: int = 0) -> float:
    """Return the trainable share that a method has after its sizes were solved, as a job does it."""
    config = PretrainConfig(
        base=base.id, method=MethodConfig(**{"heads": 0, "ffn_units": 0, **method}, trainable_budget=budget)
    )
    counts = ModelSpec.of(config, base, num_new_words=num_new_words).solve().counts
    assert counts.trainable <= counts.encoder
    return counts.trainable / counts.encoder


@pytest.mark.parametrize("name", SIZED)
def test_a_budget_is_met_within_a_hundredth(name: str) -> None:
    """On the base that ships and on the shape of BERT-base, or refused in a sentence; new words count."""
    bases = {"general-mini": load_shipped(), "bert-base": replace(load_shipped(), config=DomextConfig(has_pooler=True))}
    for (shape, base), budget in product(bases.items(), (0.05, 0.17, 0.4)):
        refusal = REFUSED.get((name, shape, budget))
        if refusal:
            with pytest.raises(ConfigError, match=re.escape(refusal)):
                solve(base, SIZED[name], budget)
        else:
            assert solve(base, SIZED[name], budget) == pytest.approx(budget, rel=0.01), (shape, budget)
    for budget in (0.17, 0.4) if name == "exbert" else ():
        assert solve(load_shipped(), MODULES, budget, NUM_SHIPPED_WORDS) == pytest.approx(budget, rel=0.01)


def test_a_budget_is_settled_by_the_part_of_the_smallest_steps() -> None:
    def count(method: MethodConfig) -> ParameterCounts:
        trained = 1000 * method.lora_rank + 7 * method.ffn_units  # a unit is 7 parameters, a rank 1,000
        return ParameterCounts(total=100_000, trainable=trained, encoder=100_000)

    method = MethodConfig(heads=0, ffn_units=100, lora_rank=4, trainable_budget=0.0873)
    solved = solve_budget(method, count, num_heads=4, hidden_size=64)
    assert abs(count(solved).trainable_frac - 0.0873) < 7 / 100_000


# --- mistakes -------------------------------------------------------------------------------------------------------

NONE, LAW = {"heads": 0, "ffn_units": 0}, {"bottleneck_size": 16}
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--method.layers is '3-4'; the encoder has the layers 0 to 3": ({"layers": "3-4"}, {}),
    "--layers is '3-1'; it must be": ({"layers": "3-1"}, {}),
    "--layers is '-1'; it must be": ({"layers": "-1"}, {}),
    "--layers is 'all'; it must be": ({"layers": "all"}, {}),
    "--method.active_adapters names 'law'; the model has domain": ({"active_adapters": "domain,law"}, {}),
    "--active_adapters is 'law'; it must be": ({"active_adapters": "law"}, LAW),
    "--method.adapter 'law' is the name of an adapter of --init_from": ({"adapter": "law"}, LAW),
    "--method.adapter 'law' is the name of an adapter of --init_from that has other parts": (
        {"adapter": "law", **NONE, **LAW},
        {**LAW, "bottleneck_parallel": True},
    ),
    "--adapter is 'a b'; it must be": ({"adapter": "a b"}, {}),
    "--method.adapter is 'keys'; it must be none of torch's words": ({"adapter": "keys"}, {}),
    "--method.trains is 'extensions'; it must be all when there is no extension": (NONE, {}),
    "--bottleneck_size is -1; it must be 0 or more": ({"bottleneck_size": -1}, {}),
    "--bottleneck_activation is 'selu'; it must be one of gelu, relu, tanh": ({"bottleneck_activation": "selu"}, {}),
    "--bottleneck_place is 'embeddings'; it must be one of both, attention, output": (
        {**LAW, "bottleneck_place": "embeddings"},
        {},
    ),
    "--bottleneck_parallel is True; it must be false without bottlenecks": ({"bottleneck_parallel": True}, {}),
    "--trains is 'layer_norms'; it must be": ({"trains": "layer_norms"}, {}),
    "--trains is 'all'; it must be extensions": ({"trains": "all", "lora_rank": 4}, {}),
    "--top_layers is 0; it must be above 0": ({"trains": "top_layers", **NONE}, {}),
    "--method.top_layers is 5; the encoder has 4 layers": ({"trains": "top_layers", "top_layers": 5, **NONE}, {}),
    "--lora_targets is 'pooler'; it must": ({"lora_rank": 4, "lora_targets": ("query", "pooler")}, {}),
    "--trainable_budget is 0.1; it must be 0": ({"ffn_units": 0, "trainable_budget": 0.1}, {}),
    "--method.trainable_budget is 0.05; the smallest size of this method": (
        {"heads": 2, "ffn_units": 1, "trainable_budget": 0.05},
        {},
    ),
    "--method.trainable_budget is 0.0021; the ": ({**NONE, "bottleneck_size": 4, "trainable_budget": 0.0021}, {}),
}


def test_a_mistake_is_one_sentence() -> None:
    """Of a method alone, or beside an adapter `law` of an earlier run."""
    base = load_shipped()
    for says, (values, law) in MISTAKES.items():
        with pytest.raises(ConfigError, match=re.escape(says)) as caught:
            config = PretrainConfig(base=base.id, method=MethodConfig(**values))
            method = size_model(config, base).method
            ModelSpec(base, method, earlier=Extensions({"law": AdapterConfig(**law)} if law else {}))
        message = str(caught.value)
        assert message.startswith("--") and message.endswith(".") and "\n" not in message and ". " not in message


# --- the table ------------------------------------------------------------------------------------------------------

PLACES_IN_TABLE = {
    "Trains": (
        "test_trains_what_it_says_and_leaves_the_rest",
        "test_gradients_are_where_it_trains",
        "test_counts_are_those_of_the_tensors",
    ),
    "Start": ("test_starts_at_the_base",),
    "Base": ("test_trains_what_it_says_and_leaves_the_rest", "test_the_base_comes_back_from_a_checkpoint"),
    "Resume": ("test_resume_is_exact",),
    "ZeRO 0–3": ("test_zero_3_on_two_workers", "test_zero_0_to_2_on_two_workers"),
    "bf16": ("test_bf16",),
    "Export": ("test_an_export_loads_with_transformers",),
}
"""The tests that stand behind each column; a cell of which one failed says so."""


def describe_shipped(row: Row) -> ModelSpec:
    """Return a row's model on the shipped base."""
    earlier = describe_extensions(describe_shipped(find_row(row.after)).shape) if row.after else Extensions()
    words = [UNKNOWN_WORD] * NUM_SHIPPED_WORDS if row.new_words else []
    method = row.make_method(shipped=True)
    return ModelSpec(load_shipped(), method, new_words=words, next_sentence=row.pairs, earlier=earlier)


@torch.no_grad()
def measure_start(row: Row) -> float:
    """How far the logits of a row's model on the shipped base are from the base's before its first step."""
    base, words = load_shipped(), [[7]] * NUM_SHIPPED_WORDS if row.new_words else []
    batch = load_tokenizer(base.folder)(read_probe("")[:16], padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    size, method = base.config.vocab_size, row.make_method(shipped=True)
    own = ModelSpec(base, method, new_words=words).build()
    expected, found = (
        model.eval()(ids, attention_mask=mask).logits[mask.bool()] for model in (build_base(base, CPU), own)
    )
    return float((found[:, :size] - expected).abs().mean())


class Collector:
    """A pytest plugin that keeps each row's outcomes."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "row" in params and (report.when == "call" or report.failed) and not report.skipped:
            key = params["row"].slug, item.originalname
            self.passed[key] = self.passed.get(key, True) and report.passed
        return report

    def format_table(self) -> str:
        """Return a table of methods and proofs, in Markdown."""
        lines = [["Method", *PLACES_IN_TABLE], ["---"] * (len(PLACES_IN_TABLE) + 1)]
        lines += [[row.name, *(self._format_cell(row, column) for column in PLACES_IN_TABLE)] for row in ROWS]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _format_cell(self, row: Row, column: str) -> str:
        if not all(self.passed.get((row.slug, test), False) for test in PLACES_IN_TABLE[column]):
            return "**fails**"
        counts = describe_shipped(row).counts
        return {
            "Trains": f"{counts.trainable:,} ({counts.trainable_frac:.1%})",
            "Start": "exact" if row.exact_start else f"{measure_start(row):.1e}",
            "Base": "kept" if keeps_base(row) else "changes",
            "Resume": "exact",
            "Export": "plain" if row.plain_export else "with code",
        }.get(column, "yes")


if __name__ == "__main__":
    collector = Collector()
    status = pytest.main([__file__, "-q", "--no-header", "-n", "0", "-m", "not gpu"], plugins=[collector])
    print(f"\n{collector.format_table()}")
    sys.exit(status)
