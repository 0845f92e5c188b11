"""The page at `/`: its script asks what the endpoints take, and reads what they answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from local_service import Served
from made_banks import CLASSES, add_drawn, make_bank

from domext_ray.models.bank_entry import TASKS
from domext_ray.serving.serve import show_address

NODE = shutil.which("node")
pytestmark = [
    pytest.mark.skipif(NODE is None, reason="there is no node to run the page's script with"),
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # of Ray Serve's own settings
]
TEXT = "🧬 the <gene> 🧬🧬 was given a drug for the heart [MASK] 🏥"


@pytest.fixture(scope="module")
def served(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bank = make_bank(tmp_path_factory.mktemp("banks") / "bank", str(tiny_base_folder))
    add_drawn(bank, "number", "sequence_classification", 2, ("value",), problem_type="regression")
    add_drawn(bank, "several", "sequence_classification", 1, CLASSES, problem_type="multi_label_classification")
    served = Served(bank)
    with served.client:
        yield served


def run(served: Served, expression: str, given: Any = None) -> Any:
    """Return what an expression of the page's script is; it calls what it is given `given`."""
    (script,) = re.findall(r'<script id="reading">(.*?)</script>', served.client.get("/").text, re.DOTALL)
    read = "const given = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    program = f"{script}\n{read}\nconsole.log(JSON.stringify({expression}));"
    ended = subprocess.run([str(NODE), "-e", program], input=json.dumps(given), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_every_choice_says_its_task_and_answers_the_questions_that_the_page_asks_it(served: Served) -> None:
    choices = run(served, "listChoices(given)", served.client.get("/v1/adapters").json())
    shown = {choice["name"]: choice for choice in choices}
    assert [*shown] == [
        "fills1",
        "fills2",
        "number",
        "several",
        "sorts1",
        "sorts2",
        "tags1",
        "tags2",
        "__base__",
        "auto",
    ]
    assert shown["tags1"]["task"] == "It finds entities: Drug, Gene." and shown["tags1"]["kinds"] == [
        "entities",
        "embed",
    ]
    assert "one label: good, bad, neither." in shown["sorts1"]["task"] and "a number." in shown["number"]["task"]
    assert "any of these labels: good" in shown["several"]["task"] and shown["fills1"]["task"] == "It fills in [MASK]."
    assert shown["__base__"]["kinds"] == ["fill-mask", "embed"] and "embed" not in shown["auto"]["kinds"]
    read = {"fill-mask": "masks", "entities": "entities", "embed": "embedding"}
    asked = [(kind, name, second) for name in shown for kind in shown[name]["kinds"] for second in ("", "the river")]
    asked = [row for row in asked if row[0] != "embed" or row[2]]  # its second text is required
    bodies = run(
        served, f"given.map(([kind, name, second]) => makeBody(kind, name, {json.dumps(TEXT)}, second))", asked
    )
    for (kind, name, second), body in zip(asked, bodies, strict=True):
        answer = served.client.post(f"/v1/{kind}", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["predictions"]
        assert len(found) == 1 + (kind == "embed") and ("pairs" in body) == (kind == "classify" and second != "")
        assert {*found[0]} & {read.get(kind, "value"), read.get(kind, "probabilities")}, name


def test_a_base_that_fills_no_masks_is_asked_for_vectors_alone(served: Served) -> None:
    given = {"adapters": [], "base": {"name": "__base__", "architecture": "masked_lm", "words": False}}
    (base,) = run(served, "listChoices(given)", given)
    assert base["kinds"] == ["embed"] and base["task"] == "The base without an adapter."
    assert run(served, "listChoices({adapters: [], base: null})") == []


def test_the_page_knows_every_task_that_is_served(served: Served) -> None:
    assert run(served, "Object.keys(TASKS)") == ["", *TASKS]
    assert {*run(served, "Object.values(KINDS)"), "embed"} == {endpoint.name for endpoint in served.service.endpoints}


def test_entities_are_marked_where_python_counts_them(served: Served) -> None:
    (answer,) = served.ask("entities", TEXT, "tags1")
    found = answer["entities"]
    assert any(entity["start"] > TEXT.index("gene") for entity in found), "behind characters of two UTF-16 units"
    pieces = run(served, "markEntities(given.text, given.entities)", {"text": TEXT, "entities": found})
    assert "".join(piece["text"] for piece in pieces) == TEXT
    marked = [(piece["text"], piece["entity"]) for piece in pieces if "entity" in piece]
    assert marked == [(TEXT[entity["start"] : entity["end"]], entity) for entity in found]
    assert (
        run(served, "markEntities(given, [])", TEXT) == [{"text": TEXT}] and run(served, "markEntities('', [])") == []
    )


def test_the_similarity_of_two_texts_is_their_cosine(served: Served) -> None:
    first, second = (answer["embedding"] for answer in served.ask("embed", ["the gene", "the river"], "fills1"))
    cosine = np.dot(first, second) / np.linalg.norm(first) / np.linalg.norm(second)
    body = run(served, "makeBody('embed', 'fills1', 'the gene', 'the river')")
    vectors = [answer["embedding"] for answer in served.client.post("/v1/embed", json=body).json()["predictions"]]
    assert run(served, "showCosine(...given)", vectors) == f"{cosine:.3f}"
    assert run(served, "showCosine([1], [-0.0001])") == "0.000"


def test_the_token_of_an_address_is_read_as_the_server_wrote_it(served: Served) -> None:
    for token in ("a-token-of-some-length", 'a+b#c%20&d=e?f/g"h'):
        fragment = urlsplit(show_address("127.0.0.1", 8000, token)).fragment
        assert run(served, "readToken(given)", f"#{fragment}") == token
    assert run(served, "[readToken(''), readToken('#else')]") == [None, None]
