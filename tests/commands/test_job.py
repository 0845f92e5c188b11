"""Every job's options: how they are read from files and flags, what is said of a wrong one, and their help."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import pytest

from domext_ray.commands.help import format_help
from domext_ray.commands.job import check_trackers, configure
from domext_ray.commands.main import JOBS, run_job
from domext_ray.config import presets
from domext_ray.config.options.build import build, read_file, read_flags
from domext_ray.config.options.kinds import list_options
from domext_ray.config.presets import find_preset
from domext_ray.config.pretrain import PretrainConfig, RunConfig
from domext_ray.errors import ConfigError

NEEDED = {
    "ablate": ("--study", "size"),
    "bank": ("--bank", "bank"),
    "compare": ("--seconds", "9"),
    "compare runs": ("--runs", "runs/af"),
    "embed": ("--input", "a.txt", "--output", "vectors"),
    "evaluate retrieval": ("--models", "base=general-mini", "--data", "collection"),
    "evaluate forgetting": ("--models", "base=general-mini", "--corpus", "a.txt"),
    "export hf": ("--run", "runs/af"),
    "predict": ("--input", "a.txt", "--output", "out"),
    "serve": ("--bank", "bank"),
    "verify": ("--path", "runs/af"),
}
"""What a job cannot do without."""
PRESETS = {
    name: read_file(job.config_class, find_preset(job.preset)) if job.preset else {} for name, job in JOBS.items()
}


@pytest.fixture(autouse=True)
def _use_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is wrapped to the terminal's width, and its length is held to a screen of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")


def read(*args: str, job: str = "pretrain af") -> Any:
    found = JOBS[job]
    given = read_flags(found.config_class, [*NEEDED.get(job, ()), *args])
    return presets.configure(found.config_class, found.preset, given)


def set_option(job: str, option: str, value: str) -> Any:
    """What `read` does, for thousands of values: the preset is read once."""
    config_class = JOBS[job].config_class
    flags = [read_flags(config_class, words).settings for words in (NEEDED.get(job, ()), [f"--{option}={value}"])]
    return build(config_class, [PRESETS[job], *flags])


def refuse(*args: str, job: str = "pretrain af") -> str:
    """What is said of a wrong command line: one sentence."""
    with pytest.raises(ConfigError) as error:
        read(*args, job=job)
    message = str(error.value)
    assert "\n" not in message and message.endswith((".", "?"))
    return message


def test_every_option_has_help_and_the_first_screen_has_a_dozen() -> None:
    for name, job in JOBS.items():
        options = list_options(job.config_class)
        assert [key for key, option in options.items() if not option.help or "see above" in option.help] == []
        assert set(job.main) <= set(job.list_main()) <= options.keys(), name
        for pattern in (entry.removeprefix("-") for entry in job.reads):
            assert any(key == pattern or (pattern[-1] in "._" and key.startswith(pattern)) for key in options), name
        first, full = format_help(job, is_full=False), format_help(job, is_full=True)
        assert first.startswith(job.about) and job.about.count(f"    domext {name}") >= 1
        assert job.sentence.endswith(".") and len(first.splitlines()) <= 45, name
        for option in options:
            assert (f"  --{option} " in full) == (not job.is_unused(option)), (name, option)
            assert f"  --{option} " in first or option not in job.list_main(), (name, option)


def test_a_jobs_function_takes_its_configuration() -> None:
    for name, job in JOBS.items():
        function = resolve_name(f"domext_ray.{job.run}") if isinstance(job.run, str) else job.run
        (first, *others) = inspect.signature(function).parameters.values()
        assert first.annotation == job.config_class.__name__, name
        assert all(param.default is not param.empty for param in others), name


def test_help_shows_the_values_of_a_run_without_flags() -> None:
    for name, job in JOBS.items():
        plain: Any = read(job=name)
        shown = dict(re.findall(r"^  --(\S+) (.*(?:\n {38}.*)*)", format_help(job, is_full=True), flags=re.M))
        for option in list_options(job.config_class):
            value = functools.reduce(getattr, option.split("."), plain)
            if isinstance(value, int) and not job.is_unused(option) and f"--{option}" not in NEEDED.get(name, ()):
                assert shown[option].endswith(f"[{str(value).lower()}]"), (name, option)


def test_a_preset_stands_in_the_place_of_the_jobs_own(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("method: {ffn_units: 64}\n")
    plain, other = read(), read("--preset", "af")
    assert (plain.replay.corpus, plain.method.word_rows, plain.method.ffn_units) == ("self", 32000, 400)
    assert (other.replay.corpus, other.method.word_rows, other.method.ffn_units) == ("", 0, 512)
    changed = read("--config", str(file), "--preset", "af", "--replay.corpus", "none")
    assert changed == replace(other, method=replace(other.method, ffn_units=64))
    assert read("--preset", "bert", job="pretrain lora") == read(job="pretrain bert")


def test_a_training_is_told_which_preset_it_stands_on() -> None:
    def ask(verb: str, *args: str) -> dict[str, str]:
        return JOBS[verb].tell(read_flags(JOBS[verb].config_class, args))

    assert [ask(f"pretrain {method}")["preset"] for method in ("af", "bert", "lora")] == ["af_words", "bert", "lora"]
    assert ask("pretrain af", "--replay.corpus", "none") == {"preset": "af"}
    assert ask("pretrain af", "--replay.corpus", "none", "--preset", "af_routed") == {"preset": "af_routed"}
    assert ask("finetune") == ask("prepare corpus") == {}


def test_without_general_text_the_preset_of_af_is_another_wherever_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("replay: {corpus: none}\nmethod: {ffn_units: 64}\n")

    def ask(*args: str, verb: str = "pretrain af") -> PretrainConfig:
        return configure(JOBS[verb], read_flags(PretrainConfig, args))

    general = tmp_path / "general.txt"
    general.write_text("The river is wide here.\nThe road goes on to the town.\n")
    plain, own = ask(), ask("--replay.corpus", str(general))
    assert own == replace(plain, replay=replace(plain.replay, corpus=str(general)))
    for flags in (("--replay.corpus", "none"), ("--replay.corpus", ""), ("--preset", "af")):
        without = ask(*flags)
        assert (without.replay.corpus, without.method.word_rows, without.method.ffn_units) == ("", 0, 512)
    assert ask("--config", str(file)).method == replace(without.method, ffn_units=64)
    assert ask("--config", str(file), "--replay.corpus", "self").method == replace(plain.method, ffn_units=64)
    assert ask("--preset", "af_words", "--replay.corpus", "none").method == plain.method, "a preset that is named stays"


def test_help_is_the_presets() -> None:
    text = format_help(JOBS["pretrain af"], is_full=False)
    assert "extra FFN units per layer (AF Adapter's a) [400]" in text and "[0.001]" in text and "[1024]" not in text
    assert "shape" not in text and "--help_all" in text and "Config file" not in text
    assert "--shape.hidden_size" in format_help(JOBS["pretrain bert"], is_full=True)


def test_asking_for_help_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h", "--help_all"):
        run_job(JOBS["pretrain af"], ["--optim.lr", "abc", flag])
        assert capsys.readouterr().out.startswith("AF Adapter: freeze a BERT")


WRONG = {
    int: ("abc", "1.5", "nan", "inf", "-inf", "1e30", "", "true", "[1]", "0x10"),
    float: ("abc", "nan", "inf", "", "true", "1,5"),
    bool: ("maybe", "", "1.5", "2"),
    dict: ("abc", "", "[1]", "{a: !x 1}", "{a"),
    str: ("a\nb", "a\tb", "a\0b", "\udce4"),
}


BY_CLASS = {job.config_class: name for name, job in JOBS.items()}
"""Verbs with a configuration of their own: several share one."""


def test_a_value_of_another_kind_is_refused_by_name() -> None:
    for config_class, name in BY_CLASS.items():
        for option in list_options(config_class).values():
            if option.is_list and option.kind is not Literal:
                values = () if option.kind is str else ("abc", "nan", "1,", "1,true", "[1, [2]]")
            elif option.is_list:  # none is a list, too
                values = ("nope", f"{option.choices[0]},", ",".join(2 * option.choices[:1]))
            else:
                values = WRONG.get(option.kind, ("nope", ""))
            for value in values:
                with pytest.raises(ConfigError) as error:
                    set_option(name, option.name, value)
                assert f"--{option.name}" in str(error.value) and "\n" not in str(error.value), (name, value)


def test_a_number_out_of_range_is_refused_or_harmless() -> None:
    for config_class, name in BY_CLASS.items():
        for option in list_options(config_class).values():
            for value in ("-1", "1e18", "0") if option.kind in (int, float) else ():
                with contextlib.suppress(ConfigError):
                    set_option(name, option.name, value)


def test_a_wrong_command_line_is_one_sentence() -> None:
    for args, says in (
        ("--lr 1", "--lr is no option; did you mean --optim.lr?"),
        ("--max-steps 3", "did you mean --train.max_steps?"),
        ("--methd.heads 3", "did you mean --method.heads?"),
        ("--config a.yaml", "--config names 'a.yaml', which does not exist."),
        ("--config af_bse.yaml", "which does not exist; did you mean --preset af_base?"),
        ("--preset af-base", "--preset: 'af-base' is no preset; did you mean the preset af_base?"),
        ("--preset", "--preset has no value; give one after it."),
        ("--xyzzy 3", "--xyzzy is no option; --help_all lists them."),
        ("-corpus x", "'-corpus' is no option; options begin with two dashes, such as --corpus."),
        ("word", "'word' stands without an option"),
        ("--seed 1 2", "'2' stands after --seed without an option"),
        ("--corpus --seed 1", "--corpus has no value; give one after it."),
        ("--method lora.yaml", "--method is 'lora.yaml', and is a group of options; give them by name, such as"),
        ("--method {headz:1}", "--method, line 1: 'method.headz:1' is no option; did you mean method.heads"),
        ("--seed -1", "--seed is -1; it must be 0 or more."),
        ("--scale.num_workers 1e9", "--scale.num_workers is 1000000000; it must be at most 16, for each worker"),
        ("--shape.num_hidden_layers 1e15", "it must be from 1 to 1,000."),
    ):
        assert says in refuse(*args.split(" ")), args


def test_flags_are_read_as_they_are_written() -> None:
    assert read("--train.max_steps", "1e3").train.max_steps == 1000
    assert read("--train.max_steps=1_000").train.max_steps == 1000
    assert read("--seed", str(2**62 + 1)).seed == 2**62 + 1
    assert read("--optim.lr", "1e-5").optim.lr == 1e-5 and read("--optim.lr", "1").optim.lr == 1.0
    assert read("--dry_run").dry_run and read("--dry_run", "--seed", "3").seed == 3
    assert [read("--objective.whole_word", word).objective.whole_word for word in ("no", "True", "off")] == [0, 1, 0]
    for name in ("007", "1e5", "null", "yes", "a: b", "include x"):
        assert read("--run.name", name).run.name == name
    assert read("--method", "{heads: 3, ffn_units: 8}").method.heads == 3


def test_lists_are_typed_with_commas_and_are_lists_in_files(tmp_path: Path) -> None:
    def rates(*args: str) -> tuple[float, ...]:
        return read(*args, job="finetune").grid.lr

    (tmp_path / "a.yaml").write_text("grid: {lr: [5e-5, 3.0e-5]}\n")
    (tmp_path / "b.yaml").write_text("grid: {lr: 5e-5}\n")
    assert rates("--grid.lr", "5e-5, 3e-5") == rates("--grid.lr", "[5e-5, 3e-5]") == (5e-5, 3e-5)
    assert rates("--config", str(tmp_path / "a.yaml")) == (5e-5, 3e-5)
    assert rates("--config", str(tmp_path / "b.yaml")) == (5e-5,)
    assert read("--method.lora_targets", "output", job="pretrain lora").method.lora_targets == ("output",)
    assert read("--budgets", "", job="compare").budgets == ()
    assert (
        read("--tokens_by_method", "af=1e3", "--seconds", "0", "--tokens", "9", job="compare").count_tokens("af")
        == 1000
    )
    assert read("--study", "size", "--top_layers", "none", job="ablate").top_layers == "none"
    assert read("--study", "size", "--top_layers", "1,2", job="ablate").top_layers == (1, 2)
    assert "must be different names" in refuse("--grid.stage_lr", "a=1,a=2", job="finetune")


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    lines = ("run: {name: 007}", "corpus: no", "optim.lr: 1e-5", "train: {max_steps: 1e5, max_seconds: 3}", "shape:")
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "dry_run: yes"]), encoding="utf-8")
    found = read("--config", str(tmp_path / "a.yaml"))
    assert (found.run.name, found.corpus, found.optim.lr, found.train.max_steps) == ("007", "no", 1e-5, 100_000)
    assert found.train.max_seconds == 3.0 and found.dry_run


def test_a_wrong_file_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text, says in (
        ("", "is empty; it must have options"),
        ("# nothing\n", "is empty; it must have options"),
        ("- a\n", "line 1: options are expected"),
        ("seed: 1\ntrian: {max_steps: 3}\n", "line 2: 'trian' is no option; did you mean train?"),
        ("train:\n  max_stepz: 3\n", "line 2: 'train.max_stepz' is no option; did you mean train.max_steps?"),
        ("lr: 3\n", "line 1: 'lr' is no option; did you mean optim.lr?"),
        ("optim.lr: 3\noptim:\n  lr: 4\n", "line 3: 'optim.lr' stands here a second time (PATH, line 1 has it)."),
        ("train: 3\n", "line 1: train is 3; it must have options of its own."),
        ("train:\n  max_steps: many\n", "--train.max_steps is 'many' (PATH, line 2); it must be a whole number."),
        ("optim:\n  lr: -1\n", "--optim.lr is -1.0 (PATH, line 2); it must be above 0 and at most 1."),
        ("corpus: {a: b}\n", "--corpus is {'a': 'b'} (PATH, line 1); it must be a text"),
        ("corpus:\n", "--corpus is None (PATH, line 1); it must be a text"),
        ("dry_run: 3\n", "--dry_run is '3' (PATH, line 1); it must be full, true or false."),
        ("seed: 1\nseed: 2\n", "line 2: 'seed' stands here a second time (line 1 has it); give it once."),
        ("train: !include other.yaml\n", "line 1: the tag '!include' is not allowed; give a plain value."),
        ("corpus: !!python/object/apply:os.system ['true']\n", "line 1: the tag '!!python/object/apply:os.system'"),
        ("train:\n  {max_steps: 3\n", "line 2: this is no YAML"),
        ("train:\n\tmax_steps: 3\n", "line 2: this is no YAML (found character '\\t'"),
        ("corpus: a\0b\n", "line 1: this is no YAML (special characters are not allowed)."),
        ("a: &a [*a]\n", "its lists or mappings are too deep."),
        ("seed: 1\n---\nseed: 2\n", "this is no YAML (but found another document)."),
        ("x: " + "9" * 2**20, "is above 1 MB"),
    ):
        path.write_text(text, encoding="utf-8")
        message = refuse("--config", str(path))
        assert says.replace("PATH", str(path)) in message and str(path) in message, text[:100]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("corpus: Größe\n".encode("latin-1"))
    assert "which is no UTF-8 text" in refuse("--config", str(tmp_path / "latin.yaml"))
    assert "which does not exist" in refuse("--config", "/no/such.yaml")
    assert "cannot be read (Is a directory)" in refuse("--config", str(tmp_path))


def test_an_option_of_a_part_is_named_in_full() -> None:
    assert refuse("--finetune.grid.lr", "fast", job="sweep").startswith("--finetune.grid.lr is 'fast'; it must be")
    own = "--finetune.method.word_rows"
    assert refuse(own, "1", job="sweep").startswith(f"{own} is 1; it must be 0 in fine-tuning")
    assert refuse("--finetune.num_resamples", "1", job="sweep").startswith("--finetune.num_resamples is 1;")


def test_a_name_that_there_is_not_is_told_before_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[object] = []
    for job, args, says in (
        ("finetune", "--data nope", "--data is 'nope'; it must be empty with --task code_entities, which ships."),
        ("finetune", "--task ner", "--data is empty; --task ner needs a folder, or a name on the hub."),
        ("finetune", "--task nerr --data nope", "did you mean ner?"),
        ("finetune", "--task ner --data ./nope", "--data is './nope', which does not exist; give a folder"),
        ("sweep", "--corpus package-docs --tasks ner,rte --data /nope,/no", "--data is '/nope', which does not exist"),
        ("ablate", "--study size --task ner", "--data is empty; --task ner needs"),
        ("ablate", "--study spans --finetuned runs/nope", "--finetuned names 'runs/nope', which does not exist; give"),
        ("pretrain af", "--base ./nope", "--base names './nope', which does not exist; give general-mini (ships"),
        ("pretrain af", "--train.general_probe nope", "--train.general_probe names 'nope', which does not exist; give"),
        ("pretrain exbert", "--vocab.size 0 --vocab.words nope", "--vocab.words names 'nope', which does not exist"),
        ("pretrain af", f"--run.dir {__file__}", "which is a file; give the folder of all runs."),
        *(
            (
                job,
                f"{given} --output {__file__}{below}",
                f"--output is '{__file__}{below}', and {__file__} is a file",
            )
            for job, given in (("embed", "--input ."), ("predict", "--input ."), ("export hf", "--run ."))
            for below in ("", "/a/b")
        ),
        ("finetune", "--model ../nope", "--model names '../nope', which does not exist; give a run's directory"),
        ("finetune", "--against ./nope", "--against names './nope', which does not exist; give a base, a run or an"),
        ("finetune", "--against general-mini", "--against is 'general-mini'; it must be another model than --model"),
        ("export hf", "--run runs/nope", "--run names 'runs/nope', which does not exist"),
        ("compare runs", "--runs .,runs/nope", "--runs names 'runs/nope', which does not exist"),
        *((job, "--corpus nope.txt", "--corpus 'nope.txt' names no file") for job in ("prepare corpus", "build vocab")),
        ("sweep", "--corpus nope.txt --tasks code_entities", "--corpus 'nope.txt' names no file"),
        ("pretrain lora", "--replay.corpus nope.txt", "--replay.corpus 'nope.txt' names no file"),
        ("compare", "--seconds 9 --corpus nope.txt", "--corpus 'nope.txt' names no file"),
        ("evaluate forgetting", "--models a=general-mini --corpus nope.txt", "--corpus 'nope.txt' names no file"),
        ("predict", "--input nope.txt --output out", "--input 'nope.txt' names no file"),
        ("embed", "--input nope.txt --output out", "--input 'nope.txt' names no file"),
        ("pretrain exbert", "--method.module_hidden_size 85", "divisible by the encoder's 4 attention heads"),
        ("bank", "--bank b --name x --add runs/nope", "--add names 'runs/nope', which does not exist"),
    ):
        with pytest.raises(SystemExit) as end:
            run_job(replace(JOBS[job], run=started.append), args.split())
        assert end.value.code == 2 and says in capsys.readouterr().err and not started, args


EARLY = (
    ("pretrain af --base general-mni", "--base names 'general-mni', which is not here; did you mean general-mini?"),
    ("pretrain af --base notes-bsae", "did you mean notes-base?"),
    (
        "pretrain af --init_from runs/clinci",
        "--init_from is 'runs/clinci', which does not exist; did you mean runs/clinic?",
    ),
    (
        "pretrain af --train.seq_length 4096",
        "--train.seq_length is 4096; the base 'general-mini' has positions for 512.",
    ),
    (
        "prepare corpus --base org/nope",
        "--base names 'org/nope', which is not on this machine, and HF_HUB_OFFLINE keeps",
    ),
    ("build vocab --base org/nope", "; give a folder of this machine, or general-mini, which ships with the package."),
    ("sweep --preset sweeps/af_min", "'sweeps/af_min' is no preset; did you mean the preset sweeps/af_mini?"),
    ("compare --methods aff --seconds 5", "--methods names 'aff'; did you mean af?"),
    ("compare --methods nope --seconds 5", "--methods names 'nope'; it must be one of full, full_kept, "),
    (
        "finetune --task set",
        "--task is 'set', which is a folder; give a family or a described set as --task, and --data set.",
    ),
    ("finetune --task ner --data sett", "--data names 'sett', which is not here; did you mean set?"),
    ("finetune --task ner --data ./sett", "--data is './sett', which does not exist; did you mean ./set?"),
    (
        "finetune --task ner --data org/nope",
        "--data names 'org/nope', which is not on this machine, and HF_HUB_OFFLINE",
    ),
    (
        "finetune --task ner --data set --model clinci",
        "--model names 'clinci', which is not here; did you mean runs/clinic?",
    ),
    (
        "finetune --task ner --data set --model runs/clinci",
        "--model names 'runs/clinci', which does not exist; did you mean",
    ),
    (
        "evaluate forgetting --models a=general-mni --corpus rows.jsonl",
        "--models names 'general-mni', which is not here;",
    ),
    (
        "evaluate retrieval --models runs/clinci --data set",
        "--models names 'runs/clinci', which does not exist; did you",
    ),
    ("serve --model general-mni", "--model names 'general-mni', which is not here; did you mean general-mini?"),
    ("serve --bank bnak", "--bank names 'bnak', which does not exist; did you mean bank?"),
    ("bank --bank bnak", "--bank names 'bnak', which does not exist; did you mean bank?"),
    (
        "bank --bank none",
        "--bank names 'none', which does not exist; give a folder that domext bank made, or --add a run.",
    ),
    ("export hf --run runs/clinci", "--run names 'runs/clinci', which does not exist; did you mean runs/clinic?"),
    ("verify runs/clinci", "--path names 'runs/clinci', which does not exist; did you mean runs/clinic?"),
    ("predict --input rows.jsonl --output out --model general-mni", "did you mean general-mini?"),
    (
        "predict --input rows.jsonl --output out --field bodi",
        "no row of --input 'rows.jsonl' has a field 'bodi' (they have",
    ),
    ("predict --input rows.jsonl --output out --field bodi --dry_run", "(they have id, body); did you mean body?"),
    (
        "predict --input rows.jsonl --output out --model runs/clinic --field bodi",
        "has a field 'bodi' (they have id, body)",
    ),
    (
        "predict --input rows.jsonl --output out --field body --max_length 9999",
        "'general-mini' takes rows of up to 512.",
    ),
    ("predict --input set --output out --task nerr", "--task is 'nerr'; did you mean ner? It must be a family ("),
    ("predict --input sett --output out --task ner", "--input names 'sett', which is not here; did you mean set?"),
    ("predict --input rows.jsonl --output out --submission QNI.tsv", "did you mean QNLI.tsv?"),
    (
        "embed --input rows.jsonl --output out",
        "no row of --input 'rows.jsonl' has a field 'text' (they have id, body); set",
    ),
    (
        "embed --input rows.jsonl --output out --field body --layers 99",
        "--layers is '99'; 'general-mini' has 4 layers.",
    ),
)
"""Command lines in a folder with a base, a run, a bank, a set and rows, and what each of them is told."""
TELL = """
import json, sys
from domext_ray.commands.main import main
for args in json.load(sys.stdin):
    try:
        main(args.split())
    except SystemExit as error:
        assert error.code == 2, args
heavy = [each for each in ("torch", "transformers", "ray", "datasets") if each in sys.modules]
assert not heavy, heavy
"""


def test_ordinary_mistakes_are_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    for name in ("notes-base", "runs/clinic", "bank", "set"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "body": "a text"}\n' * 3)
    asked = json.dumps([args for args, _ in EARLY])
    done = subprocess.run([sys.executable, "-c", TELL], input=asked, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    for (args, says), line in zip(EARLY, done.stderr.splitlines(), strict=True):
        assert line.startswith("error: ") and says in line, (args, line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bank", "notes-base", "rows.jsonl", "runs", "set"]


def test_flags_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    run_job(
        replace(JOBS["prepare corpus"], run=seen.append),
        ["--method.heads", "2", "--seed", "1", "--seed", "3", "--train.seq_length", "64"],
    )
    assert capsys.readouterr().out.splitlines() == [
        "warning: --seed is given more than once; the last one, 3, counts.",
        "warning: --method.heads, --seed have no effect in this job.",
    ]
    assert len(seen) == 1


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
def test_a_tracker_whose_package_is_missing_is_one_sentence(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # how Python notes that there is none
    says = rf'^--run.trackers has {tracker}, which is not installed: pip install "domext_ray\[{tracker}\]"\.$'
    for job in ("pretrain af", "pretrain bert", "sweep", "compare"):
        flags = [*NEEDED.get(job, ()), "--run.trackers", f"tensorboard,{tracker}"]
        with pytest.raises(ConfigError, match=says):
            configure(JOBS[job], read_flags(JOBS[job].config_class, flags))


def test_a_bucket_is_no_place_for_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="an extra")
    run = RunConfig(dir="s3://bucket/runs", trackers=("tensorboard", "mlflow"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"cannot write to s3://bucket/runs; set MLFLOW_TRACKING_URI\.$"):
        check_trackers(run)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(run)
