"""`domext serve` on Ray: replicas that answer alike, come back when they are killed, and end after the last request."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from browser import CHROMIUM, open_browser
from conftest import REPOSITORY
from finetuned_models import CPU, FULL, fit, make_raw
from job_calls import call_job
from job_processes import find_workers, heed_signals, kill_job
from made_banks import CLASSES, add_drawn, make_bank
from raylets import find_port
from transformers import AutoTokenizer

from domext_ray.config.serve import ServeConfig
from domext_ray.errors import ConfigError
from domext_ray.finetuning.export import export_stages
from domext_ray.models.bank import AdapterBank
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.serving.catalogue import LOOK_SECONDS
from domext_ray.storage import Place

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
TOKEN = "a-token-of-some-length"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
TEXTS = [f"the patient was given {word} for the heart" for word in ("a drug", "the gene", "water", "bread", "no care")]
SECONDS = 300


class Server:
    """A job that serves, and a client of it."""

    def __init__(self, place: Path, *options: str, option: str = "--bank") -> None:
        self.port = find_port()
        command = [sys.executable, str(REPOSITORY / "jobs" / "serve.py"), option, str(place), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DOMEXT_SERVE_TOKEN": TOKEN},
            start_new_session=True,
            preexec_fn=heed_signals,
        )
        self.address = f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, values: Any = None) -> requests.Response:
        return requests.request(method, self.address + path, json=values, headers=HEADERS, timeout=SECONDS)

    def wait(self, status: int = 200) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline
            with contextlib.suppress(requests.ConnectionError):
                if self.call("GET", "/readyz").status_code == status:
                    return
            time.sleep(0.2)

    def end(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=SECONDS)[0].decode()
        assert self.process.returncode == 128 + signal.SIGTERM, said
        return said


@pytest.fixture(scope="module")
def bank(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterBank:
    bank = make_bank(tmp_path_factory.mktemp("banks") / "bank", str(tiny_base_folder))
    for name in ("fills2", "tags2"):
        bank.remove(name)
    return bank


@pytest.fixture(scope="module")
def server(bank: AdapterBank) -> Iterator[Server]:
    server = Server(Path(bank.folder), "--replicas", "2", "--scale.threads", "1")
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            kill_job(server.process)


@torch.no_grad()
def compute_classes(bank: AdapterBank) -> dict[tuple[str, str], dict[str, float]]:
    tokenizer = AutoTokenizer.from_pretrained(bank.base.folder)
    found = {}
    for name in ("sorts1", "sorts2"):
        model = bank.load(name)
        for text in TEXTS:
            logits = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0]
            found[name, text] = dict(zip(CLASSES, logits.softmax(-1).tolist(), strict=True))
    return found


def ask_many(server: Server, bank: AdapterBank, seconds: float) -> Counter[int]:
    """Ask from eight clients for a while; every answer is its adapter's own. Returns how often each status came."""
    expected, statuses, wrong = compute_classes(bank), Counter[int](), list[Any]()

    def ask(number: int) -> None:
        for place in range(10**6):
            if time.monotonic() > deadline:
                return
            name, text = f"sorts{1 + place % 2}", TEXTS[(number + place) % len(TEXTS)]
            try:
                answer = server.call("POST", "/v1/classify", {"inputs": text, "adapter": name})
            except requests.ConnectionError as error:
                wrong.append(error)
                return
            statuses[answer.status_code] += 1
            if answer.status_code == 200:
                (own,) = answer.json()["predictions"]
                if own["adapter"] != name or own["probabilities"] != pytest.approx(expected[name, text], abs=1e-4):
                    wrong.append(own)

    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    return statuses


def test_every_answer_is_its_adapters_own(server: Server, bank: AdapterBank) -> None:
    assert ask_many(server, bank, 3.0).keys() == {200}
    metrics = server.call("GET", "/metrics").text
    (adapters,) = (line.split()[1] for line in metrics.splitlines() if line.startswith("domext_batch_adapters_sum"))
    (passes,) = (line.split()[1] for line in metrics.splitlines() if line.startswith("domext_batch_adapters_count"))
    assert float(adapters) > float(passes), "passes have rows of several adapters"


def test_nothing_listens_beyond_this_machine(server: Server) -> None:
    family = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))]
    listening = [
        connection
        for connection in psutil.net_connections("inet")
        if connection.status == "LISTEN" and connection.pid in family
    ]
    assert server.port in {connection.laddr.port for connection in listening}
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_adapters_come_and_go_in_all_replicas(server: Server, bank: AdapterBank) -> None:
    asked = {"inputs": "a [MASK]", "adapter": "fills3"}
    for seed in (3, 4):
        assert server.call("POST", "/v1/fill-mask", asked).status_code == 404
        add_drawn(bank, "fills3", "masked_lm", seed)
        answers = [server.call("POST", "/v1/fill-mask", asked) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        bank.remove("fills3")
        time.sleep(LOOK_SECONDS + 0.1)


def test_a_replica_that_is_killed_comes_back_and_answers_nothing_wrong(server: Server, bank: AdapterBank) -> None:
    before = {worker.pid for worker in find_workers(server.process, "ServeReplica:domext:Encoder")}
    assert len(before) == 2
    victim = min(before)
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    statuses = ask_many(server, bank, 6.0)
    assert statuses[200] and statuses.keys() <= {200, 503}, statuses
    deadline = time.monotonic() + SECONDS
    while len({worker.pid for worker in find_workers(server.process, "ServeReplica:domext:Encoder")} - {victim}) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    server.wait()
    assert ask_many(server, bank, 3.0).keys() == {200}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to look at the page with")
def test_a_person_uses_the_page(server: Server, tmp_path: Path) -> None:
    def choose(name: str, question: str = "") -> None:
        browser.run(
            "(() => { const select = document.getElementById('adapter');"
            f"select.value = [...select.options].findIndex(each => each.text === '{name}');"
            "select.dispatchEvent(new Event('change')); })()"
        )
        if question:
            browser.run(f"document.querySelector('#kinds input[value={question}]').click()")

    def ask(text: str, second: str = "") -> list[str]:
        for place, written in (("text", text), ("pair", second)):
            browser.run(f"document.getElementById('{place}').value = {json.dumps(written)}")
        browser.run("document.getElementById('status').textContent = ''; document.getElementById('text').focus()")
        browser.press("Enter", modifiers=2)
        browser.wait(r"/answers? in \d/.test(document.getElementById('status').textContent)")
        cards = browser.run("[...document.querySelectorAll('.answer')].map(each => each.innerText)")
        assert browser.run("document.querySelectorAll('.answer b, .fault').length") == 0, cards
        return list(cards)

    def is_hidden(place: str) -> bool:
        return bool(browser.run(f"document.getElementById('{place}').hidden"))

    with open_browser(tmp_path / "profile") as browser:
        browser.open(f"{server.address}/#token=wrong")
        browser.wait("!document.getElementById('error').hidden")
        assert browser.run("document.getElementById('error').textContent").startswith("The token is missing or wrong")
        assert browser.run("location.href") == f"{server.address}/", "the address shows the token no longer"
        browser.complaints.clear()  # the browser notes the status 401
        browser.type(TOKEN)
        browser.press("Enter")
        browser.wait("!document.getElementById('ask').hidden")
        browser.run(f"location.hash = 'token={TOKEN}'")  # of the address that the server printed
        browser.wait(f"location.href === '{server.address}/'")
        browser.run("location.reload()")
        browser.wait("!document.getElementById('ask').hidden")
        shown = browser.run("[...document.getElementById('adapter').options].map(each => each.text)")
        assert shown == ["fills1", "sorts1", "sorts2", "tags1", "base", "auto (routers choose)"]
        first, other = ask("<b>the gene</b> [MASK] 🧬 was given a drug")
        assert (
            first.startswith("fills1\n[MASK]\n") and other.startswith("base\n") and "%" in first and is_hidden("second")
        )
        browser.run("document.getElementById('run').focus()")
        browser.press("Tab", modifiers=8)  # back to the last of the others, by the keyboard alone
        browser.press(" ")
        assert "answered by fills1" in ask("the gene [MASK]")[2]
        choose("sorts1")
        assert browser.run("document.getElementById('task').textContent").endswith("one label: good, bad, neither.")
        assert not is_hidden("second") and ask("the gene")[0] != ask("the gene", "<b>the river</b>")[0]
        choose("tags1")
        tagged, routed = ask("<b>the gene</b> 🧬 was given a drug")
        assert tagged.count("🧬") >= 1 and "<" in tagged and " to " in tagged and "answered by tags1" in routed
        choose("sorts2", "embed")
        assert "Cosine similarity: 1.000" in ask("the gene", "the gene")[0]
        choose("tags1")
        for width in (400, 1280):
            for scheme in ("light", "dark"):
                browser.resize(width, 900, scheme)
                ask("<b>the gene</b> 🧬 was given a drug")
                assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
                browser.save_picture(tmp_path / f"{width}-{scheme}.png")
        assert not browser.complaints
        colours = browser.run("JSON.stringify(getComputedStyle(document.body).backgroundColor)")
        assert json.loads(colours) == "rgb(20, 23, 26)"  # dark, as the last size was asked for


def test_the_end_waits_for_open_requests(server: Server) -> None:
    answers: list[int] = []

    def ask() -> None:
        values = {"inputs": [TEXTS[0]] * 64, "adapter": "sorts1"}
        answers.append(server.call("POST", "/v1/classify", values).status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    said = server.end()
    for thread in threads:
        thread.join()
    assert said.endswith("stopped by SIGTERM; all requests were answered.\n")
    stages = ["opening the bank ", "starting Ray\n", "loading the model on 2 replicas: 0 ready, 0:0", "serving at http"]
    assert re.findall("|".join(stages), said) == stages
    assert "Traceback" not in said and TOKEN not in said and TEXTS[0] not in said
    assert set(answers) <= {200, 503} and 200 in answers


def test_a_fine_tuned_model_is_served_as_predict_uses_it(tiny_base_folder: Path, tmp_path: Path) -> None:
    start = open_model(str(tiny_base_folder)).load()
    task, fitted = fit(start, "multilabel", FULL)
    export_stages(start, task, fitted, Place(tmp_path / "notes" / "export"))
    model = load_exported(tmp_path / "notes" / "export", CPU)
    expected = model.predict(make_raw("multilabel", [{"text": text} for text in TEXTS])).records
    server = Server(tmp_path / "notes" / "export", "--replicas", "2", option="--model")
    try:
        server.wait()
        for _ in range(4):  # of either replica
            answers = server.call("POST", "/v1/classify", {"inputs": TEXTS}).json()["predictions"]
            for answer, record in zip(answers, expected, strict=True):
                assert answer["adapter"] == "notes" and answer["labels"] == record["labels"]
                assert answer["probabilities"] == pytest.approx(record["probabilities"], abs=1e-5)
        assert "one model, without a base beside it" in server.end()
    finally:
        if server.process.poll() is None:
            kill_job(server.process)


def test_mistakes_end_in_one_sentence(bank: AdapterBank, tmp_path: Path) -> None:
    ended = call_job("serve", "--bank", str(bank.folder), "--dry_run", "true")
    assert ended.code == 0 and "sorts1" in ended.out and "classification: good, bad, neither" in ended.out
    for options, sentence in (
        (["--bank", str(bank.folder), "--adapters", "nobody"], "has no adapter 'nobody'"),
        (["--bank", str(tmp_path)], "is no adapter bank"),
        (["--bank", str(bank.folder), "--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000 cannot be listened on"),
        (["--bank", str(bank.folder), "--max_length", "1000"], "--max_length is 1000; the base has 128 positions"),
    ):
        ended = call_job("serve", *options)
        *stages, error = ended.err.splitlines()
        assert ended.code == 2 and sentence in error
        assert [stage.split()[0] for stage in stages] == ["opening", "starting"][: len(stages)], ended.err


@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of Ray Serve's own settings
def test_a_serve_that_runs_already_stays_as_it_is(
    bank: AdapterBank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray import serve

    from domext_ray.serving import serve as serving

    @serve.deployment
    class Other:
        def __call__(self) -> str:
            return "another's"

    def refuse(config: ServeConfig) -> str:
        with pytest.raises(ConfigError) as error, serving.start_serving(config):
            pass
        return str(error.value)

    monkeypatch.setattr(serving, "TOKEN_FOLDER", tmp_path)
    port = find_port()
    config = ServeConfig(bank=str(bank.folder), port=port)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        assert f"give --host 127.0.0.1 --port {port}, or end it" in refuse(replace(config, port=find_port()))
        serve.run(Other.bind(), name="other", route_prefix="/")
        assert 'Prefix / is being used by application "other"' in refuse(config)
        serve.delete("other")
        terminal = os.fdopen(os.openpty()[1], "w")
        with terminal, contextlib.redirect_stdout(terminal), serving.start_serving(config) as said:
            kept = [path.read_text() for path in tmp_path.iterdir()]
            address = f"http://127.0.0.1:{port}/#token={kept[0].strip()}"
            assert said.startswith(f"serving at {address} (token: {tmp_path}/serve-token-")
            assert f"has an application 'domext' at http://127.0.0.1:{port}/ already" in refuse(config)
            assert requests.get(f"http://127.0.0.1:{port}/healthz", timeout=SECONDS).status_code == 200
            assert [path.read_text() for path in tmp_path.iterdir()] == kept
        monkeypatch.setattr(serving, "run_on_each_node", lambda *_, own: [("node-2", False)])
        assert f"{bank.folder} is not visible on node node-2; give --bank a folder" in refuse(config)
    finally:
        serve.shutdown()
