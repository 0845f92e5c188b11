"""The endpoints over a real model, without Ray: whose answer it is, what is refused, and what the page gets."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_service import TOKEN, Served
from made_banks import CLASSES, add_drawn, make_bank
from object_store import BUCKET, Proxy, use_objects

from domext_ray.commands.bank import format_bank
from domext_ray.config.serve import LimitConfig
from domext_ray.models.bank import AdapterBank
from domext_ray.serving.catalogue import LOOK_SECONDS, Catalogue
from domext_ray.serving.endpoints import Classify, ClassifyRequest
from domext_ray.serving.engine import Engine
from domext_ray.serving.served_model import ServedBank
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

TEXT = "the patient was given a drug for the heart"


@pytest.fixture(scope="module")
def folder(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_bank(tmp_path_factory.mktemp("banks") / "bank", str(tiny_base_folder)).folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Served]:
    served = Served(AdapterBank.open(folder))
    with served.client:
        yield served


@pytest.fixture
def own(folder: Path) -> Iterator[Served]:
    served = Served(AdapterBank.open(folder))
    with served.client:
        yield served


def wait_for_rows(served: Served, number: int) -> None:
    deadline = time.monotonic() + 120
    while served.service.batcher.num_queued < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_fills_are_the_adapters_own(shared: Served) -> None:
    text = "the [MASK] was given a [MASK]"
    answers = shared.ask("fill-mask", [text, text, text], ["fills1", "fills2", "__base__"], top_k=3)
    assert [reply["adapter"] for reply in answers] == ["fills1", "fills2", "__base__"]
    tokenizer = shared.service.catalogue.tokenizer
    batch = tokenizer(text, return_tensors="pt")
    for answer in answers[:2]:
        model = shared.bank.load(answer["adapter"])
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[0][batch["input_ids"][0] == tokenizer.mask_token_id]
        expected = logits.softmax(-1).topk(3)
        for mask, values, ids in zip(answer["masks"], expected.values, expected.indices, strict=True):
            assert text[mask["start"] : mask["end"]] == "[MASK]"
            assert [fill["token"] for fill in mask["fills"]] == tokenizer.convert_ids_to_tokens(ids)
            assert [fill["probability"] for fill in mask["fills"]] == pytest.approx(values.tolist(), abs=1e-5)
    assert answers[0]["masks"] != answers[1]["masks"]


def test_vectors_are_the_encoders(shared: Served) -> None:
    batch = shared.service.catalogue.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        states = shared.bank.load("fills1").bert(batch["input_ids"]).last_hidden_state[0]
    (mean,) = shared.ask("embed", TEXT, "fills1")
    (first,) = shared.ask("embed", TEXT, "fills1", pooling="cls", normalize=True)
    assert mean["embedding"] == pytest.approx(states.mean(0).tolist(), abs=1e-4)
    assert first["embedding"] == pytest.approx((states[0] / states[0].norm()).tolist(), abs=1e-4)
    assert shared.ask("embed", TEXT, "__base__")[0]["embedding"] != mean["embedding"]
    assert shared.ask("embed", TEXT.replace(" ", "\u200b"), "fills1") == [mean], "as predict reads it"


def test_routers_choose_per_text_among_adapters_that_can_answer(shared: Served) -> None:
    texts = ["the gene [MASK]", "the river [MASK]"]
    names = [answer["adapter"] for answer in shared.ask("fill-mask", texts, "auto")]
    assert names == ["fills1", "__base__"]
    known, unknown = shared.ask("classify", texts, "auto")
    assert known["adapter"] == "sorts1" and known["label"] in CLASSES
    assert unknown == {"adapter": "__base__", "label": None, "probabilities": {}}
    assert shared.ask("entities", texts[1], "auto") == [{"adapter": "__base__", "entities": []}]


def test_what_no_router_knows_is_answered_with_the_fields_of_those_that_chose(
    tiny_base_folder: Path, tmp_path: Path
) -> None:
    kinds = {"classification": ("single_label_classification", CLASSES), "regression": ("regression", ("value",))}
    kinds["multilabel"] = ("multi_label_classification", CLASSES)
    empty = {"label": None, "labels": [], "probabilities": {}, "value": None}
    for names in (["multilabel"], ["regression"], [*kinds]):
        bank = AdapterBank.create(tmp_path / "-".join(names), str(tiny_base_folder))
        gene = load_tokenizer(bank.base.folder).convert_tokens_to_ids("gene")
        add_drawn(bank, "idle", "sequence_classification", 3, CLASSES)
        for name in names:
            problem, labels = kinds[name]
            add_drawn(bank, name, "sequence_classification", 4, labels, gene, problem_type=problem)
        served = Served(bank)
        with served.client:
            known, unknown = served.ask("classify", ["the gene", "the river"], "auto")
            fields = {field for name in names for field in served.ask("classify", TEXT, name)[0]}
        assert known["adapter"] in names
        assert unknown == {"adapter": "__base__", **{field: empty[field] for field in empty if field in fields}}


def test_a_base_without_words_fills_no_masks_of_text_that_no_router_knows(own: Served) -> None:
    own.service.catalogue.has_words = False
    assert own.ask("fill-mask", "the river [MASK]", "auto") == [{"adapter": "__base__", "masks": []}]
    assert own.ask("fill-mask", "the gene [MASK]", "auto")[0]["masks"]


def test_vectors_are_pooled_as_the_adapter_learned_it(own: Served) -> None:
    (mean,) = own.ask("embed", TEXT, "fills1")
    catalogue = own.service.catalogue
    catalogue._adapters["fills1"] = replace(catalogue.list()[0], pooling="cls")
    (learned,), (first,), (asked,) = (
        own.ask("embed", TEXT, "fills1", **wishes) for wishes in ({}, {"pooling": "cls"}, {"pooling": "mean"})
    )
    assert learned == first != mean == asked


def test_texts_of_different_adapters_and_endpoints_share_a_pass(own: Served) -> None:
    own.replica.gate.clear()
    threads = [
        threading.Thread(target=own.ask, args=arguments)
        for arguments in (
            ("embed", TEXT, "__base__"),
            ("classify", TEXT, "sorts1"),
            ("classify", [TEXT, TEXT], ["sorts2", "sorts1"]),
            ("fill-mask", "a [MASK]", "fills2"),
            ("embed", TEXT, "tags1"),
        )
    ]
    for thread in threads:
        thread.start()
    wait_for_rows(own, 6)
    own.replica.gate.set()
    for thread in threads:
        thread.join(120)
    assert sum(map(len, own.replica.passes)) == 6 and len(own.replica.passes) <= 2
    assert max(len(set(names)) for names in own.replica.passes) >= 3


UNANSWERED: list[tuple[str, dict[str, Any], int, str]] = [
    ("classify", {"inputs": TEXT, "adapter": "nobody"}, 404, "no adapter 'nobody' is served here; give one of "),
    ("classify", {"inputs": TEXT, "adapter": "tags1"}, 422, "does not answer classify; those that do are sorts1, "),
    ("classify", {"inputs": TEXT, "adapter": "__base__"}, 422, "does not answer classify"),
    ("classify", {"inputs": TEXT}, 422, "adapter is missing; give one of fills1, "),
    ("classify", {"inputs": [TEXT] * 3, "adapter": ["sorts1", "sorts2"]}, 422, "has 2 names and inputs 3 texts"),
    ("classify", {"inputs": [], "adapter": "sorts1"}, 422, "inputs has no text"),
    ("classify", {"inputs": " ", "adapter": "sorts1"}, 422, "a text is empty"),
    ("classify", {"inputs": ["a"] * 9, "adapter": "sorts1"}, 413, "inputs has 9 texts; give 8 at most"),
    ("classify", {"inputs": "a" * 1001, "adapter": "sorts1"}, 413, "a text has 1,001 characters"),
    ("classify", {"inputs": "a " * 200, "adapter": "sorts1"}, 413, "a text has 200 tokens, and the adapter takes"),
    ("embed", {"inputs": "a " * 200, "adapter": "sorts1"}, 413, "and embed takes 126; shorten it, or set truncate"),
    ("fill-mask", {"inputs": TEXT, "adapter": "fills1"}, 422, "a text has no [MASK]"),
    (
        "fill-mask",
        {"inputs": f"{'a ' * 200}[MASK]", "adapter": "fills1", "truncate": True},
        413,
        "a text has a [MASK] behind its first 126 tokens",
    ),
    ("fill-mask", {"inputs": "[MASK]", "adapter": "fills1", "top_k": 0}, 422, "top_k is not as it must be"),
    ("fill-mask", {"inputs": 3, "adapter": "fills1"}, 422, "inputs.str is not as it must be"),
    ("fill-mask", {"inputs": "[MASK]", "adaptor": "fills1"}, 422, "adaptor is not as it must be: Extra inputs"),
    ("embed", {"inputs": "\ud800", "adapter": "fills1"}, 422, "a text has half a surrogate pair"),
    ("classify", {"inputs": [TEXT, "", " "], "adapter": "sorts1"}, 422, "text 2 of 3, counted from 1, is empty; give"),
    ("classify", {"inputs": [TEXT, TEXT, "a" * 1001], "adapter": "sorts1"}, 413, "text 3 of 3, counted from 1, has 1"),
    ("embed", {"inputs": ["\ud800", TEXT], "adapter": "fills1"}, 422, "text 1 of 2, counted from 1, has half a"),
    ("embed", {"inputs": [TEXT, "a " * 200], "adapter": "sorts1"}, 413, "text 2 of 2, counted from 1, has 200 tokens"),
    ("fill-mask", {"inputs": ["[MASK]", TEXT], "adapter": "fills1"}, 422, "text 2 of 2, counted from 1, has no [MASK]"),
    ("fill-mask", {"inputs": "[MASK]", "pairs": TEXT, "adapter": "fills1"}, 422, "pairs is not as it must be: Extra"),
    ("classify", {"inputs": TEXT, "pairs": " ", "adapter": "sorts1"}, 422, "a pair is empty; give texts"),
    (
        "classify",
        {"inputs": [TEXT] * 2, "pairs": TEXT, "adapter": "sorts1"},
        422,
        "pairs has 1 texts and inputs 2; give",
    ),
    (
        "classify",
        {"inputs": [TEXT] * 2, "pairs": [TEXT, "a" * 1001], "adapter": "sorts1"},
        413,
        "pair 2 of 2, counted from 1, has 1,001 characters",
    ),
    ("classify", {"inputs": "a " * 63, "pairs": "b " * 63, "adapter": "sorts1"}, 413, "a pair has 126 tokens, and the"),
]


def test_what_cannot_be_answered_is_said_in_one_sentence(shared: Served) -> None:
    for kind, values, status, sentence in UNANSWERED:
        body = json.dumps(values).encode()
        answer = shared.client.post(f"/v1/{kind}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert sentence in answer.json()["error"] and answer.json()["error"].endswith(".")
    for content in (b"{", b"[1]", b"", b"inputs=a"):
        answer = shared.client.post("/v1/embed", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"].split(";")[0]) == (422, "the body is no JSON object")


def test_long_texts_are_cut_where_that_is_asked_for(shared: Served) -> None:
    (answer,) = shared.ask("classify", "heart " * 150, "sorts1", truncate=True)
    assert answer["truncated"] is True and answer["label"] in CLASSES
    (answer,) = shared.ask("fill-mask", "[MASK] " + "heart " * 150, "fills1", truncate=True)
    assert answer["truncated"] is True and len(answer["masks"]) == 1
    assert "truncated" not in shared.ask("classify", TEXT, "sorts1", truncate=True)[0]


def test_heads_without_a_description_are_read_by_their_labels(tiny_base_folder: Path, tmp_path: Path) -> None:
    bank = AdapterBank.create(tmp_path / "bank", str(tiny_base_folder))
    add_drawn(bank, "several", "sequence_classification", 1, CLASSES, problem_type="multi_label_classification")
    add_drawn(bank, "number", "sequence_classification", 2, ("value",), problem_type="regression")
    add_drawn(bank, "strange", "token_classification", 3, ("Drug", "Gene"))
    served = Served(bank)
    with served.client:
        several, number = served.ask("classify", [TEXT, TEXT], ["several", "number"])
        batch = served.service.catalogue.tokenizer(TEXT, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = bank.load("several")(batch).logits[0].sigmoid().tolist()
            value = bank.load("number")(batch).logits[0].item()
        assert several["probabilities"] == pytest.approx(dict(zip(CLASSES, expected, strict=True)), abs=1e-5)
        assert number["value"] == pytest.approx(value, abs=1e-5)
        answer = served.post("entities", TEXT, "strange")
        assert answer.status_code == 503 and "tags are served in the order O, B-X" in answer.json()["error"]


def test_the_only_adapter_needs_no_name(folder: Path) -> None:
    served = Served(AdapterBank.open(folder), names=["sorts2"])
    with served.client:
        assert served.ask("classify", TEXT)[0]["adapter"] == "sorts2"


def test_requests_show_the_token(shared: Served) -> None:
    for path in ("/v1/adapters", "/metrics", "/v1/adapters/fills1", "/nowhere"):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            answer = shared.client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            assert TOKEN not in answer.text
    for path in ("/healthz", "/readyz", "/", "/openapi.json"):
        assert shared.client.get(path, headers={"Authorization": ""}).status_code == 200


def test_head_is_answered_as_get_without_a_body(shared: Served) -> None:
    for path in ("/", "/healthz", "/readyz", "/openapi.json", "/metrics", "/v1/adapters", "/v1/embed", "/nowhere"):
        for headers in ({}, {"Authorization": ""}):
            head, got = (getattr(shared.client, method)(path, headers=headers) for method in ("head", "get"))
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["Content-Type"] == got.headers["Content-Type"], path
            if path != "/metrics":  # it counts these requests, too
                assert head.headers["Content-Length"] == got.headers["Content-Length"], path


def test_bodies_are_bounded_also_without_a_length(shared: Served) -> None:
    big = b"x" * 4001
    assert shared.client.post("/v1/embed", content=big).status_code == 413
    answer = shared.client.post("/v1/embed", content=iter([big[:3000], big[3000:]]))
    assert (answer.status_code, "4,000 bytes" in answer.json()["error"]) == (413, True)


def test_a_full_queue_is_429_and_what_is_in_it_is_answered(own: Served) -> None:
    own.replica.gate.clear()
    answers: list[int] = []
    texts = [TEXT] * 8

    def ask() -> None:
        answers.append(own.post("classify", texts, "sorts1").status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for_rows(own, 16)
    refused = own.post("classify", TEXT, "sorts1")
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    own.replica.gate.set()
    for thread in threads:
        thread.join(120)
    assert answers == [200, 200] and own.post("classify", TEXT, "sorts1").status_code == 200


def test_a_lost_replica_is_503(own: Served) -> None:
    own.replica.is_lost = True
    answer = own.post("classify", TEXT, "sorts1")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert own.client.get("/readyz").status_code == 503 and own.client.get("/healthz").status_code == 200


def test_readiness_asks_no_replica(own: Served) -> None:
    own.replica.gate.clear()
    asking = threading.Thread(target=own.ask, args=("classify", TEXT, "sorts1"))
    asking.start()
    for _ in range(200):  # anybody may ask; the replica is busy all the while
        assert own.client.get("/readyz", headers={"Authorization": ""}).status_code == 200
    assert own.replica.passes == []
    own.replica.gate.set()
    asking.join(120)
    assert own.replica.passes == [["sorts1"]]


def test_no_answer_in_time_is_503(folder: Path) -> None:
    served = Served(AdapterBank.open(folder), LimitConfig(seconds=0.2))
    with served.client:
        served.replica.gate.clear()
        answer = served.post("classify", TEXT, "sorts1")
        served.replica.gate.set()
        assert answer.status_code == 503 and "within 0.2 s" in answer.json()["error"]


def test_while_it_ends_new_requests_are_refused(own: Served) -> None:
    own.app.is_draining = True
    answer = own.post("classify", TEXT, "sorts1")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert own.client.get("/readyz").status_code == 503 and own.client.get("/healthz").status_code == 200


@pytest.fixture
def bank(folder: Path, tmp_path: Path) -> AdapterBank:
    """A bank that a test may change."""
    return AdapterBank.open(shutil.copytree(folder, tmp_path / "bank"))


def list_names(served: Served) -> list[str]:
    return [adapter["name"] for adapter in served.client.get("/v1/adapters").json()["adapters"]]


def test_adapters_come_and_go_with_the_bank(bank: AdapterBank) -> None:
    served = Served(bank)
    with served.client:
        assert served.post("classify", TEXT, "sorts3").status_code == 404
        add_drawn(bank, "sorts3", "sequence_classification", 33, CLASSES)
        before = served.ask("classify", TEXT, "sorts3")[0]["probabilities"]
        assert "sorts3" in list_names(served)
        bank.remove("sorts3")
        time.sleep(LOOK_SECONDS + 0.1)
        answer = served.post("classify", TEXT, "sorts3")
        assert answer.status_code == 404 and "no adapter 'sorts3' is served here" in answer.json()["error"]
        assert "sorts3" not in list_names(served)
        add_drawn(bank, "sorts3", "sequence_classification", 99, ("else", "other"))
        after = served.ask("classify", TEXT, "sorts3")[0]["probabilities"]
        assert after.keys() == {"else", "other"} and before.keys() == set(CLASSES)
        bank.remove("sorts3")
        served.ask("classify", TEXT, "sorts2")  # read after that one had left, so that one leaves the encoder, too
        assert served.replica.engine.attached.keys() == {"sorts2"}


def test_adapters_that_were_not_asked_for_are_not_served(bank: AdapterBank) -> None:
    served = Served(bank, names=["sorts1", "tags1"])
    with served.client:
        add_drawn(bank, "sorts3", "sequence_classification", 33, CLASSES)
        assert [served.post("classify", TEXT, f"sorts{number}").status_code for number in (1, 2, 3)] == [200, 404, 404]
        assert list_names(served) == ["sorts1", "tags1"]


def test_a_look_at_a_bank_is_one_listing(
    tiny_base_folder: Path, objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many adapters it has: they may be hundreds, and a server looks up to once per second."""
    proxy = Proxy(objects)
    use_objects(proxy.address, monkeypatch)
    bank = AdapterBank.create(f"{BUCKET}/{tmp_path.name}/bank", str(tiny_base_folder))
    names = [f"sorts{i}" for i in range(5)]
    for seed, name in enumerate(names):
        add_drawn(bank, name, "sequence_classification", seed, CLASSES)
    catalogue = Catalogue(ServedBank(AdapterBank.open(bank.folder, str(tiny_base_folder))))

    def count(look: Callable[[], object]) -> tuple[int, int]:
        proxy.requests.clear()
        look()
        listings = [request for request in proxy.requests if "list-type=2" in request]
        return len(listings), len(proxy.requests) - len(listings)

    assert count(catalogue.refresh) == (1, 0) and catalogue.names() == names
    assert count(lambda: format_bank(bank)) == (1, 2 * len(names)), "whether each is there, and what it says"
    bank.remove("sorts1")
    bank.remove("sorts2")
    add_drawn(bank, "sorts2", "sequence_classification", 99, CLASSES)
    listings, others = count(catalogue.refresh)
    assert listings == 1 and others < len(names) + 2 and catalogue.names() == ["sorts0", *names[2:]]
    assert catalogue.list()[1].sha256 == bank.describe("sorts2").sha256, "it is another one of that name"
    proxy.close()


def test_a_damaged_adapter_is_not_served_at_all(bank: AdapterBank) -> None:
    (path,) = Path(bank.find_folder("sorts2")).glob("adapter-*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    served = Served(bank)
    with served.client:
        answer = served.post("classify", TEXT, "sorts2")
        assert answer.status_code == 503 and "differs from the sha256" in answer.json()["error"]
        assert "sorts2" not in list_names(served) and served.replica.engine.attached == {}
        assert served.ask("classify", TEXT, "sorts1")[0]["adapter"] == "sorts1"
        path.write_bytes(content)
        assert served.ask("classify", TEXT, "sorts2")[0]["adapter"] == "sorts2"


def test_a_row_made_for_an_adapter_that_was_replaced_is_refused(bank: AdapterBank) -> None:
    catalogue, engine = Catalogue(ServedBank(bank)), Engine(ServedBank(bank), torch.device("cpu"))
    adapters = [adapter for adapter in catalogue.list() if adapter.name in ("sorts1", "sorts2")]
    rows = [
        Classify(catalogue).ask({"text": TEXT}, adapter, ClassifyRequest(inputs=TEXT)).rows[0] for adapter in adapters
    ]
    bank.remove("sorts2")
    add_drawn(bank, "sorts2", "sequence_classification", 99, ("else", "other"))
    kept, refused = engine.run(rows)
    assert isinstance(kept, tuple) and isinstance(refused, Exception)
    assert "another one now" in str(refused)


def test_prometheus_reads_what_was_answered(own: Served) -> None:
    own.ask("classify", [TEXT, TEXT], ["sorts1", "sorts2"])
    own.ask("classify", TEXT, "sorts1")
    own.post("classify", TEXT, "made-up")
    own.client.get("/v1/made-up/path")
    text = own.client.get("/metrics").text
    for line in (
        'domext_requests_total{adapter="several",route="/v1/classify",status="200"} 1.0',
        'domext_requests_total{adapter="sorts1",route="/v1/classify",status="200"} 1.0',
        'domext_requests_total{adapter="",route="/v1/classify",status="404"} 1.0',
        'domext_requests_total{adapter="",route="other",status="404"} 1.0',
        'domext_request_seconds_count{route="/v1/classify"} 3.0',
        "domext_batch_rows_sum 3.0",
        "domext_queue_rows 0.0",
    ):
        assert line in text
    assert "made-up" not in text


def test_openapi_describes_every_endpoint(shared: Served) -> None:
    paths = shared.client.get("/openapi.json").json()["paths"]
    assert {"/v1/fill-mask", "/v1/classify", "/v1/entities", "/v1/embed", "/v1/adapters"} <= paths.keys()
    assert shared.client.get("/docs").status_code == 404  # it would load scripts of another site


def test_the_page_needs_nothing_from_elsewhere(shared: Served) -> None:
    answer = shared.client.get("/")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.search(r"(?:src|href|@import|url\()\s*=?\s*[\"'(]?(?:https?:)?//", answer.text)
    assert "innerHTML" not in answer.text and "insertAdjacentHTML" not in answer.text
