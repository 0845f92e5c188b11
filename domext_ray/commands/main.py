"""The program `domext`: its first words say which verb, and the verb's job reads the rest.

Enters: a command line. Leaves: what the verb does; a user's mistake is one sentence and exit code 2.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from domext_ray.commands import measuring, pretraining, using
from domext_ray.commands.completion import SHELLS
from domext_ray.commands.help import ALL, FEW, format_help, print_text
from domext_ray.commands.job import Job
from domext_ray.config.options.declare import ConfigT
from domext_ray.config.options.kinds import suggest
from domext_ray.config.presets import describe_preset, find_preset, list_presets
from domext_ray.errors import ConfigError
from domext_ray.runtime.stopping import exit_on_user_error

JOBS = {job.verb: job for job in (*pretraining.JOBS, *measuring.JOBS, *using.JOBS)}
"""Every job by its verb, of one word or two."""
PRESETS, COMPLETION = "presets", "completion"
FIRST_WORDS = [*dict.fromkeys(verb.split()[0] for verb in JOBS), PRESETS, COMPLETION]
_PAIRS = [verb.split() for verb in JOBS if " " in verb]
SECOND_WORDS = {first: [second for other, second in _PAIRS if other == first] for first, _ in _PAIRS}
"""What may follow the first word of a verb."""

_ABOUT_PRESETS = "List the presets, files of options that ship with the package; domext presets show af prints one."
_USE_OF_PRESETS = "Each verb begins with its own preset; --preset af_base chooses another one."
_ABOUT_COMPLETION = (
    "Print a script with which bash, zsh or fish completes verbs, options and values at a Tab: domext completion bash."
)
_USE_OF_COMPLETION = """
    source <(domext completion bash)                    # in this shell alone; zsh: the same with zsh
    domext completion fish | source                     # in this fish alone

    mkdir -p ~/.local/share/bash-completion/completions ~/.config/fish/completions
    domext completion bash > ~/.local/share/bash-completion/completions/domext    # in every new bash
    domext completion zsh > ~/.domext.zsh               # in every new zsh, with source ~/.domext.zsh in ~/.zshrc
    domext completion fish > ~/.config/fish/completions/domext.fish               # in every new fish

For every new bash you need the package bash-completion of your system. Repeat the command after an upgrade of
domext_ray. Every change is tested with bash; zsh 5.9 and fish 3.6 are tested where they are installed."""
_ABOUT = """Domain adaptation of BERT models: a frozen base, small extensions, your text.

    domext pretrain af --base bert-base-uncased --corpus 'texts/*.txt' --run.name clinic
    domext pretrain af --help                           # the options of a verb
"""
_COLUMN = 23


def main(args: Sequence[str] | None = None) -> None:
    """Carry out a command line, without the program's name; None reads `sys.argv`."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in (*FEW, *ALL):
        print_text(format_verbs())
    elif words[0] == "--version":
        from domext_ray.runs.run_directory import list_versions

        print_text(list_versions().get("domext_ray", "unknown"))
    elif words[0] in SECOND_WORDS.keys() - JOBS.keys() and words[1:2] and words[1] in (*FEW, *ALL):
        print_text(_format_table(f"{words[0]} {second}" for second in SECOND_WORDS[words[0]]))
    elif words[0] in (PRESETS, COMPLETION):
        with exit_on_user_error():
            (show_presets if words[0] == PRESETS else show_completion)(words[1:])
    else:
        with exit_on_user_error():
            job, rest = find_job(words)
        run_job(job, rest)


def run_job(job: Job[ConfigT], args: Sequence[str] | None = None, program: str = "") -> None:
    """Carry out a job, given a command line without the verb; `program` is how its help calls it, if not so."""
    arguments = list(sys.argv[1:] if args is None else args)
    with exit_on_user_error():
        if any(flag in arguments for flag in (*FEW, *ALL)):
            is_full = any(flag in arguments for flag in ALL)
            print_text(format_help(job, is_full=is_full, program=program))
        else:
            job.start(job.read(arguments))


def run_file(path: str) -> None:
    """Carry out the job of a file in jobs/, which has its verb's name."""
    files = {verb.replace(" ", "_"): job for verb, job in JOBS.items()}
    name = Path(path).stem
    run_job(files[name], program=f"python jobs/{name}.py")


def find_job(words: Sequence[str]) -> tuple[Job[Any], Sequence[str]]:
    """Return the job whose verb a command line begins with, and the words after it; a ConfigError if there is none."""
    first, rest = words[0], words[1:]
    second = rest[0] if rest and not rest[0].startswith("-") else ""
    seconds = SECOND_WORDS.get(first, [])
    what, of = ("method", "of") if first == "pretrain" else ("word", "after")
    if second in seconds:
        return JOBS[f"{first} {second}"], rest[1:]
    if second and seconds and (first not in JOBS or suggest(second, seconds)):
        raise ConfigError(f"{second!r} is no {what} {of} {first}{_hint(suggest(second, seconds))}")
    if first in JOBS:
        return JOBS[first], rest
    if seconds:
        raise ConfigError(f"{first} needs a {what} after it: {', '.join(seconds)}.")
    if first.startswith("-"):
        raise ConfigError(f"{first!r} stands before the verb; the verb comes first, as in domext finetune --help.")
    raise ConfigError(f"{first!r} is no verb of domext{_hint(_suggest_verbs(first))}")


def _suggest_verbs(word: str) -> list[str]:
    """Return what a first word was probably meant to be: a verb, as 0.1.0 wrote it (compare_runs) or not, or a part."""
    if (spaced := word.replace("_", " ").replace("-", " ")) in JOBS:
        return [spaced]
    dotted = [verb.replace(" ", ".") for verb in JOBS]
    return suggest(word, FIRST_WORDS) or [near.replace(".", " ") for near in suggest(word, dotted)]


def _hint(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else "; domext --help lists them."


def format_verbs() -> str:
    """Return the help of the program: its verbs, with a sentence each."""
    others = [_format_row(PRESETS, _ABOUT_PRESETS), _format_row(COMPLETION, _ABOUT_COMPLETION)]
    return "\n".join([_ABOUT, _format_table(JOBS), *others])


def _format_table(verbs: Iterable[str]) -> str:
    return "\n".join(_format_row(verb, JOBS[verb].sentence) for verb in verbs)


def _format_row(name: str, text: str) -> str:
    return textwrap.fill(text, 120, initial_indent=f"  {name:<{_COLUMN}}", subsequent_indent=" " * (_COLUMN + 2))


def show_presets(words: Sequence[str]) -> None:
    """List the presets, or print one, given nothing, or `show` and its name; anything else is a ConfigError."""
    if not words or words[0] in (*FEW, *ALL):
        rows = [f"  {name:<{_COLUMN + 4}}{describe_preset(name)}" for name in list_presets()]
        print_text("\n".join([_ABOUT_PRESETS, _USE_OF_PRESETS, "", *rows]))
    elif words[0] == "show" and len(words) == 2:
        print_text(find_preset(words[1]).read_text(encoding="utf-8").rstrip())
    else:
        raise ConfigError(f"domext presets {' '.join(words)!r} is not understood; give domext presets, or show NAME.")


def show_completion(words: Sequence[str]) -> None:
    """Print a shell's script, or without a word how it is used; anything but a shell's name is a ConfigError."""
    if not words or words[0] in (*FEW, *ALL):
        print_text(f"{_ABOUT_COMPLETION}\n{_USE_OF_COMPLETION}")
    elif len(words) == 1 and words[0] in SHELLS:
        others = {PRESETS: ["show"], f"{PRESETS} show": list_presets(), COMPLETION: [*SHELLS]}
        following = {"": [*FIRST_WORDS, FEW[0], "--version"], **SECOND_WORDS, **others}
        print_text(SHELLS[words[0]](JOBS, following).rstrip())
    else:
        shells = f"{COMPLETION} {' or '.join(SHELLS)}"
        raise ConfigError(f"domext completion {' '.join(words)!r} is not understood; give domext {shells}.")
