"""What bash completes at a Tab: by the script of `domext completion bash`, in a bash that finds no program."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from domext_ray.commands.main import FIRST_WORDS, JOBS, SECOND_WORDS, main
from domext_ray.config.presets import list_presets

BASH = str(shutil.which("bash"))
ASK = """
ask() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _domext
    echo "${COMPREPLY[*]}"
}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "domext"
    with pytest.MonkeyPatch.context() as patched, path.open("w", encoding="utf-8") as file:
        patched.setattr(sys, "stdout", file)
        main(["completion", "bash"])
    return path


def complete(script: Path, lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return what is offered for the last word of each line, whose words are those that bash finds in it."""
    asked = "".join(f"ask {shlex.join(['domext', *words])}\n" for words in lines)
    command = [BASH, "--norc", "-c", f"set -eu\nsource {shlex.quote(str(script))}\n{ASK}{asked}"]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.split("\n")[:-1]]


OFFERED = {
    ("eva",): "evaluate",
    ("com",): "compare completion",
    ("evaluate", ""): "forgetting retrieval",
    ("evaluate", "f"): "forgetting",
    ("compare", "r"): "runs",
    ("compare", "--see"): "--seeds --seed",
    ("compare", "--seconds", "9", "r"): "",
    ("compare", "runs", "--"): "--runs --output --preset --config --help --help_all",
    ("pretrain", "--seed", "1", "a"): "",
    ("pretrain", "af", "--preset", "af_r"): "af_routed af_routed_base",
    ("pretrain", "af", "--preset", "="): " ".join(list_presets()),
    ("pretrain", "af", "--preset", "=", "af_r"): "af_routed af_routed_base",
    ("pretrain", "af", "--preset", "=", "af", "--optim.sch"): "--optim.schedule",
    ("pretrain", "af", "--optim.schedule", ""): "linear cosine wsd",
    ("pretrain", "lora", "--method.lora_targets", "query,v"): "query,value",
    ("pretrain", "lora", "--method.lora_targets", "query,value,q"): "query,value,query",
    ("pretrain", "af", "--dry_run", ""): "full true false",
    ("pretrain", "af", "--dry_run", "--see"): "--seed",
    ("pretrain", "af", "--corpus", ""): "",
    ("pretrain", "af", "--optim.lr", ""): "",
    ("prepare", "corpus", "--method"): "",
    ("predict", "--format", ""): "parquet jsonl",
    ("embed", "--format", ""): "parquet npy",
    ("verify", ""): "",
    ("verify", "--p"): "--path --preset",
    ("verify", "runs/af", ""): "",
    ("presets", ""): "show",
    ("presets", "show", "sweeps/af"): "sweeps/af_full sweeps/af_mini",
    ("completion", ""): "bash",
    ("evaluate_forgetting", "--"): "",
}
"""The words behind `domext` -> what is offered for the last one; without an offer bash completes names of files."""


def test_words_are_offered_where_they_may_stand(script: Path) -> None:
    for words, offered in zip(OFFERED, complete(script, [*OFFERED]), strict=True):
        assert offered == OFFERED[words].split(), words


def test_every_verb_every_option_and_every_fixed_value_is_offered(script: Path) -> None:
    assert complete(script, [[""]]) == [[*FIRST_WORDS, "--help", "--version"]]
    assert complete(script, [[first, ""] for first in SECOND_WORDS if first not in JOBS]) == [
        seconds for first, seconds in SECOND_WORDS.items() if first not in JOBS
    ]
    offered = complete(script, [[*verb.split(), "-"] for verb in JOBS])
    values: dict[tuple[str, ...], list[str]] = {}
    for (verb, job), flags in zip(JOBS.items(), offered, strict=True):
        options = job.list_read()
        assert flags == [*(f"--{name}" for name in options), "--preset", "--config", "--help", "--help_all"], verb
        fixed = {name: [*option.words] for name, option in options.items() if option.words}
        values |= {(*verb.split(), f"--{name}", ""): words for name, words in fixed.items()}
    assert len(values) > 400 and complete(script, [*values]) == [*values.values()]


KEYS = (
    ("domext ev\tf\t", ["evaluate", "forgetting"]),
    ("domext pretrain af --optim.sch\tc\t", ["pretrain", "af", "--optim.schedule", "cosine"]),
    ("domext pretrain af --preset=af_routed_\t--see\t", ["pretrain", "af", "--preset=af_routed_base", "--seed"]),
    (
        "domext pretrain lora --method.lora_targets query,v\t",
        ["pretrain", "lora", "--method.lora_targets", "query,value"],
    ),
    ("domext pretrain af --corpus only\t", ["pretrain", "af", "--corpus", "only_one.txt"]),
    ("domext verify only\t", ["verify", "only_one.txt"]),
)
"""What is typed, and the words that `domext` gets then."""


def test_a_tab_completes(script: Path, tmp_path: Path) -> None:
    """In a terminal, where bash cuts a line into words."""
    (tmp_path / "only_one.txt").touch()
    got = tmp_path / "got"
    typed = [f"source {script}", 'domext() { printf "%s\\n" "$@" "" >>got; }', *(keys for keys, _ in KEYS), "exit"]
    ours, theirs = pty.openpty()
    command, env = [BASH, "--norc", "--noprofile", "-i"], {"PATH": "/nowhere", "TERM": "dumb", "INPUTRC": "/dev/null"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as shell:
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in typed).encode())
        while shell.poll() is None:
            try:
                os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
    os.close(ours)
    calls = [call.splitlines() for call in got.read_text(encoding="utf-8").split("\n\n")[:-1]]
    assert calls == [words for _, words in KEYS]


def test_the_script_is_clean(script: Path) -> None:
    command = [Path(sys.executable).with_name("shellcheck"), "--shell", "bash", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
