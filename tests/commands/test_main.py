"""The program `domext` and the files in jobs/: which verb is meant, and what is said of a wrong one."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
from conftest import REPOSITORY
from project_file import read_project_file

from domext_ray.commands.main import JOBS, SECOND_WORDS, find_job, main
from domext_ray.config.presets import FOLDER, list_presets

FILES = {path.stem: path for path in (REPOSITORY / "jobs").glob("*.py") if path.stem != "benchmark"}
HEAVY = {"torch", "ray", "transformers", "numpy", "deepspeed", "pyarrow", "matplotlib", "datasets"}


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints that does its work."""
    main(words)
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence of a command that is refused."""
    with pytest.raises(SystemExit) as end:
        main(words)
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "") and printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").rstrip()


def test_help_has_a_sentence_for_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    text = say(capsys, "--help")
    assert text == say(capsys) == say(capsys, "-h")
    rows = " ".join(text.split())
    for verb, job in JOBS.items():
        assert f" {verb} {job.sentence}" in rows
    lines = text.splitlines()
    assert (
        " presets List " in rows and " completion Print " in rows and len(lines) <= 45 and max(map(len, lines)) <= 120
    )


def test_help_of_a_first_word_has_what_may_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert {first for first in SECOND_WORDS if first in JOBS} == {"compare"}, "whose help is its own"
    for first, seconds in SECOND_WORDS.items():
        rows = say(capsys, first, "--help").splitlines()
        found = [row.split()[1] for row in rows if row.startswith(f"  {first} ")]
        assert found == ([] if first in JOBS else seconds) and max(map(len, rows)) <= 120
    assert say(capsys, "compare", "--help").startswith("Compare methods with one trainable budget")
    assert say(capsys, "compare", "runs", "--help").startswith("Compare finished runs")


def test_no_second_word_can_be_an_option_s_value() -> None:
    assert not [first for first in SECOND_WORDS if first in JOBS and JOBS[first].word]


def test_a_wrong_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for command, says in (
        ("pretrian af", "'pretrian' is no verb of domext; did you mean pretrain?"),
        ("fine-tune --task ner", "'fine-tune' is no verb of domext; did you mean finetune?"),
        ("compare-runs", "'compare-runs' is no verb of domext; did you mean compare runs?"),
        ("forgeting", "'forgeting' is no verb of domext; did you mean evaluate forgetting?"),
        ("evalute forgetting", "'evalute' is no verb of domext; did you mean evaluate?"),
        ("exprt_hf", "'exprt_hf' is no verb of domext; did you mean export hf?"),
        ("evaluate", "evaluate needs a word after it: forgetting, retrieval."),
        ("build --vocab.size 9", "build needs a word after it: vocab."),
        ("evaluate forgeting", "'forgeting' is no word after evaluate; did you mean forgetting?"),
        ("export xyzzy", "'xyzzy' is no word after export; domext --help lists them."),
        ("compare rnus --runs a", "'rnus' is no word after compare; did you mean runs?"),
        ("compare af", "'af' stands without an option; options are given as --OPTION VALUE (see --help)."),
        ("xyzzy", "'xyzzy' is no verb of domext; domext --help lists them."),
        ("--base x", "'--base' stands before the verb; the verb comes first, as in domext finetune --help."),
        ("pretrain", "pretrain needs a method after it: af, bottleneck, exbert, lora, bert."),
        ("pretrain --base x", "pretrain needs a method after it: af, bottleneck, exbert, lora, bert."),
        ("pretrain exbrt", "'exbrt' is no method of pretrain; did you mean exbert?"),
        ("pretrain gpt", "'gpt' is no method of pretrain; domext --help lists them."),
        ("pretrain af --lr 1", "--lr is no option; did you mean --optim.lr?"),
        ("finetune ner", "'ner' stands without an option; options are given as --OPTION VALUE (see --help)."),
        ("presets af", "domext presets 'af' is not understood; give domext presets, or show NAME."),
        ("completion csh", "domext completion 'csh' is not understood; give domext completion bash or zsh or fish."),
        ("complete", "'complete' is no verb of domext; did you mean completion?"),
        ("presets show af-base", "'af-base' is no preset; did you mean the preset af_base?"),
        ("presets show af_mini", "'af_mini' is no preset; did you mean the preset sweeps/af_mini?"),
        ("presets show xyzzy", "'xyzzy' is no preset; domext presets lists them."),
    ):
        assert refuse(capsys, *command.split()) == says


@pytest.mark.parametrize("verb", [verb for verb in JOBS if " " in verb])
def test_a_verb_of_two_words_that_is_written_as_one_is_named(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As 0.1.0 had export_hf; and as files have pretrain_af."""
    for old in (verb.replace(" ", "_"), verb.replace(" ", "-")):
        assert refuse(capsys, old, "--seed", "1") == f"{old!r} is no verb of domext; did you mean {verb}?"


def test_a_verb_and_its_file_carry_out_the_same_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {verb.replace(" ", "_") for verb in JOBS} == set(FILES)
    for verb in JOBS:
        path = FILES[verb.replace(" ", "_")]
        by_verb = say(capsys, *verb.split(), "--help_all")
        monkeypatch.setattr(sys, "argv", [str(path), "--help_all"])
        runpy.run_path(str(path), run_name="__main__")
        by_file = capsys.readouterr().out
        assert f"domext {verb} " in by_verb and f"python jobs/{path.name} " in by_file
        assert by_file.replace(f"python jobs/{path.name}", f"domext {verb}") == by_verb
        assert max(map(len, by_file.splitlines())) <= 120, verb
        assert find_job([*verb.split(), "--seed", "1"]) == (JOBS[verb], ["--seed", "1"])


def test_the_program_is_installed_under_its_name() -> None:
    project = read_project_file()
    assert EntryPoint("domext", project["project"]["scripts"]["domext"], "console_scripts").load() is main


def test_the_version_is_the_installed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert say(capsys, "--version").strip() == version("domext_ray")


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = say(capsys, "presets")
    assert [row.split()[0] for row in text.splitlines() if row.startswith("  ")] == list_presets()
    assert max(map(len, text.splitlines())) <= 120
    for name in ("af", "sweeps/af_mini"):
        assert say(capsys, "presets", "show", name) == (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def run_alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    "command",
    [["--help"], ["pretrain", "af", "--help_all"], ["completion", "bash"], ["finetune", "--lr", "1"]],
    ids=str,
)
def test_help_and_mistakes_import_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules))))\n"
        f"from domext_ray.commands.main import main\nmain({command!r})"
    )
    done = run_alone(code, tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.returncode == (2 if "--lr" in command else 0), done.stderr
    if "--lr" in command:
        assert done.stderr == "error: --lr is no option; did you mean --grid.lr?\n"


def test_a_reader_who_stops_reading_is_no_error(tmp_path: Path) -> None:
    code = "from domext_ray.commands.main import main; main(['pretrain', 'af', '--help_all'])"
    command = f'{sys.executable} -c "{code}" | head -1'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("AF Adapter")


def test_a_job_begins_with_its_process(tmp_path: Path) -> None:
    code = "import time\nfrom domext_ray.commands.pretraining import _find_process_start\nprint(_find_process_start())"
    before = time.time()
    done = run_alone(f"import time\ntime.sleep(1)\n{code}", tmp_path)
    started = float(done.stdout)
    assert before - 0.05 < started < time.time() - 1, "the clock of processes has ticks of a hundredth of a second"
