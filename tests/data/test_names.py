"""Names of models and sets: what is a slip, what is a path, and how often the hub is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_hub import ModelHub

from domext_ray.errors import BaseModelError, ConfigError, DomextError
from domext_ray.text.data.names import check_name, find_near, is_path, is_slip, pick_near

GIVE = "a folder, or a hub id"


def refuse(name: str, kind: str = "model") -> str:
    with pytest.raises(DomextError) as error:
        check_name("--model", name, kind, GIVE, ["general-mini"])  # type: ignore[arg-type]
    assert type(error.value) is (BaseModelError if kind == "model" else ConfigError)
    return str(error.value)


def test_a_slip_is_one_letter_or_two_that_changed_places() -> None:
    for name in ("general-mni", "general-minii", "general-mimi", "genearl-mini", "General_Mini", "eneral-mini"):
        assert is_slip(name, "general-mini"), name
    for name in ("general", "general-maxi", "bert-base-uncased", "mini-general", "general-mini-v2"):
        assert not is_slip(name, "general-mini"), name
    assert not is_slip("bert-base-cased", "bert-base-uncased"), "both are models of the hub"
    assert pick_near("ag", ["af", "general-mini", "agx"]) == ["af", "agx"]


def test_what_no_name_of_the_hub_is_like_is_a_path() -> None:
    for name in ("a b", *r"./a ../a ~/a /a a/b/c a/ a\b base.bin a/b.JSON runs/af bank:af".split()):
        assert is_path(name), name
    for name in ("bert-base-uncased", "org/model-v1.5", "gpt2", "org/xlm_r.base"):
        assert not is_path(name), name


def test_a_name_that_is_near_or_a_path_never_leaves_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_hub: ModelHub
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/clinic-ner", "notes-base", "lab/cardiology"):
        (tmp_path / folder).mkdir(parents=True)
    near = "which is not here; did you mean {}? To use the hub's {}, fetch it first: hf download {}."
    for name, meant in (
        ("general-mni", "general-mini"),
        ("Notes_base", "notes-base"),
        ("clinic-nre", "runs/clinic-ner"),
        ("clinic-ner", "runs/clinic-ner"),
        ("lab/cardiologi", "lab/cardiology"),
    ):
        assert refuse(name) == f"--model names {name!r}, {near.format(meant, name, name)}"
    assert refuse("notes-bas", "dataset").endswith("fetch it first: hf download notes-bas --repo-type dataset.")
    assert f"which is not here; give {GIVE}. To use the hub's lab/x," in refuse("lab/x")
    for name, says in (
        ("runs/clinic-nre", "did you mean runs/clinic-ner?"),
        ("./notes-bsae", "did you mean ./notes-base?"),
        ("notes-base.bin", "did you mean notes-base?"),
        ("runs/af", f"give {GIVE}."),
    ):
        assert refuse(name) == f"--model names {name!r}, which does not exist; {says}"
    assert model_hub.asked == []
    assert find_near("lab/cardiologgy") == ["lab/cardiology"] and find_near("no/such/folder") == []


def test_about_any_other_name_the_hub_is_asked_once(
    model_hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_hub.known |= {"/api/models/org/model", "/api/datasets/org/set"}
    check_name("--model", "org/model", "model", GIVE)
    check_name("--data", "org/set", "dataset", GIVE)
    assert model_hub.asked == ["GET /api/models/org/model", "GET /api/datasets/org/set"]
    said = f"which is not on this machine, and {model_hub.address} has no such model that may be read (HF_TOKEN says"
    assert said in refuse("org/modle")
    assert refuse("general-mini-v2").endswith("; did you mean general-mini?")
    assert model_hub.asked[2:] == ["GET /api/models/org/modle", "GET /api/models/general-mini-v2"]
    snapshot = tmp_path / "hub" / "models--org--kept" / "snapshots" / "1" / "config.json"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text("{}")
    (tmp_path / "hub" / "models--org--kept" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--kept" / "refs" / "main").write_text("1")
    check_name("--model", "org/kept", "model", GIVE)
    model_hub.close()
    gives = "give a folder of this machine, or general-mini, which ships with the package."
    assert refuse("org/model").endswith(f"{model_hub.address} cannot be reached (ConnectError); {gives}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "and HF_HUB_OFFLINE keeps this job off the network; give a folder of" in refuse("org/model")
    assert len(model_hub.asked) == 4
