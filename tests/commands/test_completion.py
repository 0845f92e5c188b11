"""What shells complete at a Tab: by the scripts of `domext completion`, in shells that find no program.

Without zsh and fish their scripts are only read: fish's whole text, and of zsh's that it has the function for bash.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from domext_ray.commands.completion import SHELLS, format_fish
from domext_ray.commands.main import FIRST_WORDS, JOBS, SECOND_WORDS, main
from domext_ray.config.presets import list_presets

PROGRAMS = {shell: str(shutil.which(shell)) for shell in SHELLS}
INSTALLED = [
    pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason=f"{shell} is not installed"))
    for shell in SHELLS
]
LIKE_BASH = INSTALLED[:2]
"""The shells that have bash's function."""
ASK = """
ask() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _domext
    echo "${COMPREPLY[*]}"
}
"""
BEFORE = {
    "bash": "set -eu",
    "zsh": "compdef() { : }",  # which only the editor of lines can carry out
}
"""What a shell does before it reads its script."""
WITHIN = {"bash": "", "zsh": "emulate sh\n"}
"""How a shell calls the function: bashcompinit sets zsh to this."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell."""
    paths = {shell: tmp_path_factory.mktemp("completion") / f"domext.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        with pytest.MonkeyPatch.context() as patched, path.open("w", encoding="utf-8") as file:
            patched.setattr(sys, "stdout", file)
            main(["completion", shell])
    return paths


def carry_out(shell: str, code: str) -> str:
    """Return what a shell prints that finds no program and reads no file of its user."""
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [PROGRAMS[shell], *options, "-c", code]
    done = subprocess.run(command, env={"PATH": "/nowhere", "HOME": "/nowhere"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def complete(shell: str, script: Path, lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return what is offered for the last word of each line, whose words are those that the shell finds in it."""
    asked = "".join(f"ask {shlex.join(['domext', *words])}\n" for words in lines)
    code = f"{BEFORE[shell]}\nsource {shlex.quote(str(script))}\n{WITHIN[shell]}{ASK}{asked}"
    return [line.split() for line in carry_out(shell, code).split("\n")[:-1]]


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
    ("pretrain", "af", "--preset=af_r"): "--preset=af_routed --preset=af_routed_base",  # as zsh cuts a line
    ("pretrain", "lora", "--method.lora_targets=query,v"): "--method.lora_targets=query,value",
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
    ("completion", ""): "bash zsh fish",
    ("evaluate_forgetting", "--"): "",
}
"""The words behind `domext` -> what is offered for the last one; without an offer bash completes names of files."""


@pytest.mark.parametrize("shell", LIKE_BASH)
def test_words_are_offered_where_they_may_stand(shell: str, scripts: dict[str, Path]) -> None:
    for words, offered in zip(OFFERED, complete(shell, scripts[shell], [*OFFERED]), strict=True):
        assert offered == OFFERED[words].split(), words


@pytest.mark.parametrize("shell", LIKE_BASH)
def test_every_verb_every_option_and_every_fixed_value_is_offered(shell: str, scripts: dict[str, Path]) -> None:
    def ask(lines: Sequence[Sequence[str]]) -> list[list[str]]:
        return complete(shell, scripts[shell], lines)

    assert ask([[""]]) == [[*FIRST_WORDS, "--help", "--version"]]
    assert ask([[first, ""] for first in SECOND_WORDS if first not in JOBS]) == [
        seconds for first, seconds in SECOND_WORDS.items() if first not in JOBS
    ]
    offered = ask([[*verb.split(), "-"] for verb in JOBS])
    values: dict[tuple[str, ...], list[str]] = {}
    for (verb, job), flags in zip(JOBS.items(), offered, strict=True):
        options = job.list_read()
        assert flags == [*(f"--{name}" for name in options), "--preset", "--config", "--help", "--help_all"], verb
        fixed = {name: [*option.words] for name, option in options.items() if option.words}
        values |= {(*verb.split(), f"--{name}", ""): words for name, words in fixed.items()}
    assert len(values) > 400 and ask([*values]) == [*values.values()]


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


EDITORS = {
    "bash": (["--norc", "--noprofile", "-i"], "source {script}"),
    "zsh": (["-f", "-i"], "source {script}; zstyle ':completion:*' insert-tab false; unsetopt list_ambiguous"),
}
"""The options of a shell in a terminal, and what is typed first."""


@pytest.mark.parametrize("shell", LIKE_BASH)
def test_a_tab_completes(shell: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    """In a terminal, where a shell cuts a line into words."""
    (tmp_path / "only_one.txt").touch()
    got, (options, begin) = tmp_path / "got", EDITORS[shell]
    typed = [begin.format(script=scripts[shell]), 'domext() { printf "%s\\n" "$@" "" >>got; }']
    typed += [*(keys for keys, _ in KEYS), "exit"]
    ours, theirs = pty.openpty()
    env = {"PATH": "/nowhere", "TERM": "dumb", "INPUTRC": "/dev/null", "HOME": str(tmp_path)}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([PROGRAMS[shell], *options], cwd=tmp_path, env=env, **ends) as program:
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in typed).encode())
        while program.poll() is None:
            try:
                os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
    os.close(ours)
    calls = [call.splitlines() for call in got.read_text(encoding="utf-8").split("\n\n")[:-1]]
    assert calls == [words for _, words in KEYS]


def test_the_script_is_clean(scripts: dict[str, Path]) -> None:
    command = [Path(sys.executable).with_name("shellcheck"), "--shell", "bash", scripts["bash"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_zsh_has_the_function_for_bash(scripts: dict[str, Path]) -> None:
    """Which its comment names, and which loads what zsh needs first."""
    bash, zsh = (scripts[shell].read_text(encoding="utf-8") for shell in ("bash", "zsh"))
    assert bash[bash.index("_domext() {") :] == zsh[zsh.index("_domext() {") :]
    assert "\nautoload -U +X bashcompinit && bashcompinit\n_domext() {" in zsh


# --- fish -----------------------------------------------------------------------------------------------------------


def unquote(text: str) -> list[str]:
    """Return the words of a line of fish, which knows two escapes between single quotes."""
    words = re.findall(r"'(?:[^'\\]|\\.)*'|\S+", text)
    return [re.sub(r"\\(['\\])", r"\1", word[1:-1]) if word[0] == "'" else word for word in words]


def read_lines(script: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the words after which each line of a script completes something, and what its flags say."""
    found = []
    for line in script.splitlines():
        if line.startswith("complete -c domext -n "):
            words = [word for word in unquote(line)[3:] if word not in ("-f", "-r", "-x")]
            says = dict(zip(words[::2], words[1::2], strict=True))
            name, *after = unquote(says.pop("-n"))
            assert name == "__domext_after"
            found.append((after, says))
    return found


def test_fish_has_every_verb_every_option_and_every_fixed_value(scripts: dict[str, Path]) -> None:
    lines = read_lines(scripts["fish"].read_text(encoding="utf-8"))
    firsts = [says["-a"] for after, says in lines if after == [""] and "-a" in says]
    assert firsts == FIRST_WORDS
    for first, seconds in SECOND_WORDS.items():
        own = {says["-a"]: says.get("-d") for after, says in lines if after == [first] and "-l" not in says}
        assert own == {second: JOBS[f"{first} {second}"].sentence for second in seconds} or first in JOBS, first
    for verb, job in JOBS.items():
        options = {says["-l"]: says for after, says in lines if verb in after and "-l" in says}
        assert options.keys() == {*job.list_read(), "preset", "config", "help", "help_all"}, verb
        for name, option in job.list_read().items():
            assert options[name]["-d"] == option.help, name
            values = unquote(options[name]["-a"][1:-1])[1:] if "-a" in options[name] else []
            assert values == [*option.words], name


def test_fish_shows_what_a_verb_is_whatever_is_written_there() -> None:
    about = "It's \"$HOME\" (and '$(x)'): 'a' \\ \\' `b` *?"
    script = format_fish({"env": replace(JOBS["env"], about=about)}, {"": ["env"]})
    assert (([""], {"-a": "env", "-d": about})) in read_lines(script)
    if shutil.which("fish"):
        assert carry_out("fish", f"{script}\ncomplete -C 'domext en'") == f"env\t{about}\n"


@pytest.mark.parametrize("shell", INSTALLED[2:])
def test_fish_completes(shell: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "only_one.txt").touch()
    lines = {
        "ev": ["evaluate"],
        "evaluate f": ["forgetting"],
        "pretrain af --optim.sch": ["--optim.schedule"],
        "pretrain af --optim.schedule ": ["cosine", "linear", "wsd"],
        "pretrain af --preset=af_r": ["--preset=af_routed", "--preset=af_routed_base"],
        "pretrain af --dry_run --see": ["--seed"],
        "pretrain lora --method.lora_targets query,v": ["query,value"],
        f"pretrain af --corpus {tmp_path}/on": [f"{tmp_path}/only_one.txt"],
        f"verify {tmp_path}/on": [f"{tmp_path}/only_one.txt"],
        f"presets {tmp_path}/on": [],
        "verify --p": ["--path", "--preset"],
        "completion ": ["bash", "fish", "zsh"],
        **{
            f"{verb} --": [f"--{name}" for name in (*job.list_read(), "preset", "config", "help", "help_all")]
            for verb, job in JOBS.items()
        },
    }
    asked = "".join(f"complete -C 'domext {line}'\necho END\n" for line in lines)
    answers = carry_out(shell, f"source {scripts[shell]}\n{asked}").split("END\n")[:-1]
    for (line, words), answer in zip(lines.items(), answers, strict=True):
        assert sorted(row.partition("\t")[0] for row in answer.splitlines()) == sorted(words), line
