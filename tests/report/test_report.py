"""The page of a run: it needs no network, says how the run stands, and where its figures come from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from report_records import ABOUT, SUMMARY, make_records, make_run, write_origin

from domext_ray.config import presets
from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.options.build import Given, dump_yaml
from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import PretrainConfig, ReplayConfig
from domext_ray.errors import RunError
from domext_ray.report.examples import Example, Guess, Masked, Question
from domext_ray.report.figures import format_summary, measure_run
from domext_ray.report.report import list_facts, write_report
from domext_ray.runs.run_directory import write_config
from domext_ray.storage import Place
from domext_ray.text.vocabulary.extension import STATISTICS_FILE

MASKED = Masked("A <b> of ", "tea", ", please.", (Question((1, 2, 3), 1, 9),))


class Page(HTMLParser):
    """What a browser would fetch, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""
        self.pictures: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg":
            self.pictures += [dict(attrs)["aria-label"]]
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "data") and value]

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\u00a0", " ")


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with its page."""
    return Path(
        write_report(Place(make_run(tmp_path_factory.mktemp("a") / "my runs" / "clinic", make_records())))
    ).parent


def test_the_page_needs_no_network_and_shows_everything(written: Path) -> None:
    text, page = (written / "report.html").read_text(encoding="utf-8"), read_page(written / "report.html")
    assert page.fetched == [] and "@import" not in page.text and "url(http" not in text
    assert page.pictures[1] == (
        "Held-out domain loss, MLM loss (nats per token), by optimiser step: 4.800 at step 0 and 3.600 at step 60."
    )
    assert len(page.pictures) == 6 and not re.search("{[{%]", page.text), "a field of the template was not filled"
    assert "<notes & letters>/*.txt" in page.text, "settings must be shown as they are, and escaped"
    for shown in (
        *("4.800", "3.600", "-25.0%", "41.0% [39.6, 42.4]", "+12.0 points [+10.1, +13.8]", "2,731", "0.4%"),
        "accuracy rose, while accuracy on general sentences is unchanged, ± 2.1 points.",
        "36.6% [35.1, 38.1]unchanged, ± 2.1 points",
        # where the run comes from
        "general-mini (sha256 abababababab)",
        "2,632,704 of 8,421,376 parameters, 32.1% of base and extension: heads 528,384; units 2,104,320",
        "900; dropped: 41 duplicate, 2 too_short",
        "3.75",  # epochs: 30 of 40 steps, then 30 of 10
        "2026-05-04 09:30 UTC",
        "2 nodes of 8 CPUs and 1 GPU (EPYC, H100)",
        "python 3.11.7, domext_ray 0.1.0, torch 2.13.0",
        "0123456789ab, with changes",
        "domext pretrain af --corpus '*.txt'",
        "5,000 masked tokens of held-out text and 3,940 words of general sentences",
        # what may come next
        "did it help? fine-tune it and its base, and compare\n"
        "domext finetune --model 'my runs/clinic' --against general-mini --task ner --data FOLDER",
        "domext evaluate forgetting --models 'base=general-mini,clinic=my runs/clinic'",
        "domext_ray.load('my runs/clinic')",
    ):
        assert shown in page.text, shown
    assert page.text.rstrip().endswith("--grid.restarts 3 --run.name clinic-ner"), "what answers the question is last"
    content = (written / "curves.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(content[16:20], "big") >= 1200, "for a README"
    files = {"run.json", "metrics.jsonl", "summary.json", "config.yaml", "report.html", "curves.png"}
    assert {path.name for path in written.iterdir()} == files


def test_the_page_names_no_place_of_this_machine(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    settings = {"base": f"{tmp_path}/bert", "corpus": "/home/ann/a b/*.txt, ~/c.jsonl,hf://org/set@1", "seed": 3}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    text = read_page(Path(write_report(Place(run_dir)))).text
    assert "base: bert\n" in text and "corpus: '*.txt, c.jsonl,hf://org/set@1'" in text and "seed: 3" in text
    assert str(tmp_path) not in text and "ann" not in re.sub("[a-z]ann|ann[a-z]", "", text)


@pytest.mark.slow
def test_the_page_says_how_far_the_run_is(tmp_path: Path) -> None:
    for i, (state, says, column) in enumerate(
        (
            ("running", "Running: step 45 of 500 on 2027-01-15 08:00 UTC. The page is written anew", "at step 40"),
            ("stopped", "Stopped at step 45 of 500 on 2027-01-15 08:00 UTC; the same command goes on.", "at step 40"),
            ("finished", "Finished at step 45 on 2027-01-15 08:00 UTC.", "after"),
        )
    ):
        folder = tmp_path / str(i)
        run_dir = make_run(folder / "clinic", make_records(60)[:46])
        (run_dir / "summary.json").unlink()
        (run_dir / "config.yaml").write_text("train: {max_steps: 500}\n")
        text = read_page(Path(write_report(Place(run_dir), state))).text  # type: ignore[arg-type]
        assert says in text and f"before{column}change" in text


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    page = read_page(Path(write_report(Place(make_run(tmp_path / "clinic", make_records()[:1])), "running")))
    assert "Running: step 0 of" in page.text and "general-probe accuracy38.6% [37.1, 40.1]––" in page.text
    assert "loss was not measured" in page.text and "What it took" not in page.text
    assert page.pictures[0] == "Training loss: not measured."


def test_examples_are_marked_and_only_their_owner_may_read_them(written: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    guesses = (Guess("coffee", 0.61, is_right=False), Guess("tea", 0.304, is_right=True))
    rare = (*(Guess(word, 0.2, is_right=False) for word in ("a", "b", "<c>")), Guess("tea", 0.0004, is_right=True))
    answers = {"before": (), "after": guesses, "with its router": rare}
    path = write_report(Place(run_dir), examples=[Example(MASKED, answers)])
    text = path.read_text(encoding="utf-8")
    assert "A &lt;b&gt; of <mark>tea</mark>, please." in text
    assert "<td>–</td><td>coffee 61.0%<br><mark>tea</mark> ✓ 30.4%</td>" in text
    assert "<td>a 20.0%<br>b 20.0%<br>&lt;c&gt; 20.0%<br>… <mark>tea</mark> ✓ &lt; 0.1%</td>" in text
    assert '<th scope="col">after</th><th scope="col">with its router</th>' in text
    assert "drawn\nby a fixed rule" in text and Path(path).stat().st_mode & 0o077 == 0
    assert "quotes your own text" in text
    for corpus, is_own in (("package-docs:40", False), ("hf://org/set@1,repair-notes", False), ("a.txt", True)):
        (run_dir / "config.yaml").write_text(f"base: general-mini\ncorpus: {corpus}\n")
        text = write_report(Place(run_dir), examples=[Example(MASKED, answers)]).read_text(encoding="utf-8")
        assert ("quotes your own text" in text) == is_own and "coffee" in text
    assert (written / "report.html").stat().st_mode & 0o044, "a page without text of the corpus is like any other file"


def test_new_words_have_their_counts(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    (run_dir / "tokenizer").mkdir()
    words = [[f"word{i}", 5000 - i] for i in range(40)]
    (run_dir / "tokenizer" / STATISTICS_FILE).write_text(json.dumps({"num_new": 1234, "top_words": words}))
    shown, _, folded = write_report(Place(run_dir)).read_text(encoding="utf-8").partition("<summary>10 more</summary>")
    assert "1,234 new words" in shown and "<li>word29 <span>4,971</span></li>" in shown
    assert "word30" not in shown and "word30" in folded and "word39" in folded


def test_changed_options_are_shown_and_the_others_folded(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    parts = "mixture: {parts: {web: {corpus: /data/web.txt}}}\n"
    (run_dir / "config.yaml").write_text("method: {name: af, heads: 3}\noptim: {lr: 0.5}\n" + parts)
    text = write_report(Place(run_dir)).read_text(encoding="utf-8")
    changed, folded = text[text.index(">Options<") :].split("<details>")
    assert '<th scope="row">optim.lr</th><td>0.5</td>' in changed and "preset af" in changed
    assert "general_probe" not in changed and "general_probe" in folded
    assert "lora_targets" not in changed, "a list that is the preset's"
    assert '<th scope="row">mixture.parts</th>' in changed and "web.txt" in changed and "/data" not in changed


@pytest.mark.parametrize(
    ("recorded", "compared"),
    [*((name, name) for name in ("af", "af_words", "af_base", "")), ("gone", ""), (None, "af")],  # 0.1.0 recorded none
)
def test_options_are_compared_with_the_preset_that_was_used(
    recorded: str | None, compared: str, tmp_path: Path
) -> None:
    """Not with the one that is called as the method, which `domext pretrain af` does not even begin with."""
    run_dir = make_run(tmp_path / "clinic", make_records())
    write_config(Place(run_dir), replace(presets.configure(PretrainConfig, compared, Given({})), seed=7))
    origin = {name: value for name, value in ABOUT.items() if name != "preset"}
    write_origin(run_dir, origin if recorded is None else {**origin, "preset": recorded})
    text = write_report(Place(run_dir)).read_text(encoding="utf-8")
    options, _, _ = text[text.index(">Options<") :].partition("<details>")
    assert re.findall(r'<th scope="row">([\w.]+)</th>', options) == ["seed"]
    assert (f"preset {compared}" if compared else "default") in options


def test_of_a_place_only_the_last_part_is_shown() -> None:
    for value, shown in (
        ("base=/x/bert,af=~/runs/af/", "base=bert,af=af"),
        ("s3://bucket/key/part.parquet", "part.parquet"),
        ("data/notes.txt", "data/notes.txt"),
        ("1/2 of the text", "1/2 of the text"),
        ({"a": ["/b/c", 4, None]}, {"a": ["c", 4, None]}),
    ):
        assert hide_places(value) == shown


def test_equal_runs_give_equal_pages(written: Path, tmp_path: Path) -> None:
    again = write_report(Place(make_run(tmp_path / "my runs" / "clinic", make_records())))
    assert again.read_bytes() == (written / "report.html").read_bytes()


def test_a_run_of_one_step_and_one_of_which_no_figure_was_measured_are_reported(tmp_path: Path) -> None:
    records = make_records(1, eval_every=1)
    for record in records:
        record["eval/general_mlm_accuracy"] = None
    records[1]["train/mlm_loss"] = None  # how the metrics file writes a loss that is not finite
    page = read_page(Path(write_report(Place(make_run(tmp_path / "short", records)))))
    assert len(page.pictures) == 6
    assert "general sentences fell" not in page.text and "general-probe accuracy–––" in page.text
    records = [{name: None if "eval/" in name else value for name, value in line.items()} for line in make_records()]
    page = read_page(Path(write_report(Place(make_run(tmp_path / "blind", records)))))
    assert len(page.pictures) == 6 and page.text.count("not measured") > 4


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="metrics.jsonl is missing"):
        write_report(Place(tmp_path))
    run_dir = make_run(tmp_path / "run", make_records())
    (run_dir / "run.json").unlink()
    with pytest.raises(RunError, match="run.json is missing"):
        write_report(Place(run_dir))
    assert not (run_dir / "report.html").exists()


def test_general_text_and_what_it_is_for_are_said() -> None:
    records = [{**record, "train/replay_epochs": record["step"] / 100} for record in make_records()]
    config = PretrainConfig(replay=ReplayConfig(corpus="/data/general.txt", frac=0.1))
    facts = dict(list_facts(config, ABOUT, records))
    assert facts["general text"] == "general.txt: 10% of all rows, keeps to the base's predictions, 0.60 epochs read"
    assert "general text" not in dict(list_facts(PretrainConfig(), ABOUT, records))


def test_the_page_says_what_the_tokenizer_does_not_know() -> None:
    domain, general = (
        {"tokens": 0.0312, "characters": 0.05, "words": ["→"]},
        {"tokens": 0.0, "characters": 0.0, "words": []},
    )
    for unknown, said in (
        ({"domain": domain}, "3.12% of the tokens, 5.00% of the characters, such as '→'"),
        (
            {"domain": general, "general": domain},
            "domain: nothing; general: 3.12% of the tokens, 5.00% of the characters, such as '→'",
        ),
        ({"domain": {}}, None),  # prepared by 0.1.0
    ):
        about = {**ABOUT, "corpus": {**ABOUT["corpus"], "unknown": unknown}}
        assert dict(list_facts(PretrainConfig(), about, make_records())).get("unknown to the tokenizer") == said


def test_the_page_says_what_is_wrong_with_a_tokenizer() -> None:
    about = {**ABOUT, "wrong_rules": "the tokenizer of --base old lowercases text: 6 of its 71 entries have capitals"}
    assert dict(list_facts(PretrainConfig(), about, make_records()))["tokenizer"] == about["wrong_rules"]
    assert "tokenizer" not in dict(list_facts(PretrainConfig(), ABOUT, make_records()))


def test_the_page_says_what_the_router_keeps_and_takes() -> None:
    config = PretrainConfig(replay=ReplayConfig(corpus="/data/general.txt"))
    record = {"threshold": 1.5, "kept": 0.971, "taken": 0.004, "written": False}
    facts = dict(list_facts(config, ABOUT, make_records(), record))
    assert facts["router"].startswith("gives the adapter 97.1% of held-out domain text and 0.4% of held-out general")
    assert "router" not in dict(list_facts(config, ABOUT, make_records())), "it still trains"
    assert facts["router"] != dict(list_facts(PretrainConfig(), ABOUT, make_records()))["router"]
    assert "(--replay.corpus)" in dict(list_facts(PretrainConfig(), ABOUT, make_records()))["router"]


def test_parts_of_a_mixture_have_a_table_and_say_what_they_share(tmp_path: Path) -> None:
    records = make_records()
    for record in records:
        for name, loss in (("domain", 3.0), ("web", 4.0)):
            if "eval/domain_mlm_loss" in record:
                record[f"parts/{name}/held_out_loss"] = loss - record["step"] / 1000
            if record["step"]:
                record |= {f"parts/{name}/tokens": 2048 * record["step"], f"parts/{name}/epochs": record["step"] / 40}
    records[-1]["parts/web/train_loss"] = 3.5
    run_dir = make_run(tmp_path / "run", records)
    parts = {"web": {"corpus": "/data/web.txt", "weight": {0: 2, 0.5: 0.5}, "keep": True}}
    config = PretrainConfig(mixture=MixtureConfig(parts=parts))
    (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    shared = "note: 3 of 70 documents of --mixture.parts web are in --corpus, too"
    about = {**ABOUT, "corpus": {**ABOUT["corpus"], "overlaps": [shared]}}
    write_origin(run_dir, about)
    page = read_page(Path(write_report(Place(run_dir))))
    step = records[-1]["step"]
    tokens, epochs, after = f"{2048 * step:,}", f"{step / 40:.2f}", 4.0 - step / 1000
    row = ["web", tokens, epochs, "3.500", "4.000", f"{after:.3f}", f"{after / 4 - 1:+.1%}"]
    assert "".join(row) in "".join(page.text.split())
    assert "The parts of the text" in page.text and shared in page.text and "/data" not in page.text
    facts = dict(list_facts(config, about, records))
    assert facts["other texts"] == "web (web.txt, general text): weight 2, 0.5 from 50% on; the text above: weight 1"
    table = format_summary({**SUMMARY, "parts": measure_run(records)["parts"]})
    assert f"held-out web loss           4.000   {after:.3f}" in table and "held-out domain loss" in table
