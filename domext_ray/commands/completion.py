"""The verbs and their options -> a shell's script, which completes command lines at a Tab, and starts no Python.

All words are in the script, so a new version needs a new one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from domext_ray.commands.help import ALL, FEW
from domext_ray.commands.job import Job
from domext_ray.config.options.build import CONFIG, PRESET
from domext_ray.config.options.kinds import Option
from domext_ray.config.presets import list_presets

Jobs = Mapping[str, Job[Any]]
Words = Mapping[str, Sequence[str]]
"""The words that may follow words: the first ones, and the second ones of verbs."""

_BASH = """# Completes command lines of domext in bash; printed by domext completion bash.
{function}
complete -o default -F _domext domext # default: names of files where no word is offered
"""
_ZSH = """# Completes command lines of domext in zsh, by the function for bash; printed by domext completion zsh.
(($+functions[compdef])) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
{function}
complete -o default -F _domext domext # default: names of files where no word is offered
"""
# What zsh has not, such as mapfile and lengths that begin with a letter, is not in it. Only bash cuts words at "=".
_FUNCTION = """_domext() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} verb="" option="" word="" before=""
    local -a offered=()
    COMPREPLY=()
    if [[ $cur == --*=* ]]; then prev=${cur%%=*} before=${cur%%=*}= cur=${cur#*=};
    elif [[ $cur == "=" ]]; then cur="";
    elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD - 2]}; fi
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
        [[ $word == -* ]] && break
        verb+=${verb:+ }$word
    done
    if [[ $word != -* ]]; then # no option stands there yet
{following}
    fi
    [[ $prev == --* && $cur != -* ]] && option=$prev # whose value is completed
{options}
    before+=${cur%"${cur##*,}"}
    cur=${cur##*,}
    for word in "${offered[@]}"; do [[ $word == "$cur"* ]] && COMPREPLY+=("$before$word"); done
    return 0
}"""
_FISH = """# Completes command lines of domext in fish; printed by domext completion fish.
function __domext_after --description 'Whether the words before the first option are one of these'
    set -l before
    set -l words (commandline -opc)
    set -e words[1]
    for word in $words
        string match -q -- '-*' $word; and break
        set -a before $word
    end
    contains -- "$before" $argv
end
function __domext_values --description 'These values, behind those that a list has already'
    set -l typed (commandline -ct | string replace -r '^--[^=]*=' '' | string match -r '^.*,')
    printf '%s\\n' "$typed"$argv
end
complete -c domext -e
"""
_ABOUT = {  # what is said of flags that are no options of a job
    f"--{PRESET}": "a preset instead of the verb's own",
    f"--{CONFIG}": "a YAML file of options",
    FEW[0]: "the most important options",
    ALL[0]: "all options",
}


def format_bash(jobs: Jobs, words: Words) -> str:
    """Return the script for bash."""
    return _BASH.replace("{function}", _format_function(jobs, words))


def format_zsh(jobs: Jobs, words: Words) -> str:
    """Return the script for zsh, which has bash's function."""
    return _ZSH.replace("{function}", _format_function(jobs, words))


def format_fish(jobs: Jobs, words: Words) -> str:
    """Return the script for fish, which also shows what verbs and options are."""
    lines = [_FISH.rstrip()]
    for before, own in words.items():
        for word in own:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {_quote(word)}"
            verb = f"{before} {word}".strip()
            lines.append(_complete([before], what, jobs[verb].sentence if verb in jobs else ""))
    lines.append(_complete([verb for verb, job in jobs.items() if not job.word], "-f", ""))
    found: dict[tuple[str, str], list[str]] = {}  # verbs, by what is completed after them
    for verb, job in jobs.items():
        options = job.list_read()
        values = _list_values(options)
        for flag in _list_flags(options):
            what = f"-l {flag[2:]}"
            if flag in values:
                what += " -x -a " + _quote(f"(__domext_values {' '.join(map(_quote, values[flag]))})")
            elif flag not in (FEW[0], *ALL):
                what += " -r"
            found.setdefault((what, _ABOUT.get(flag) or options[flag[2:]].help), []).append(verb)
    return "\n".join([*lines, *(_complete(verbs, what, about) for (what, about), verbs in found.items())]) + "\n"


SHELLS: dict[str, Callable[[Jobs, Words], str]] = {"bash": format_bash, "zsh": format_zsh, "fish": format_fish}
"""What writes the script of a shell, by its name."""


def _list_flags(options: Mapping[str, Option]) -> list[str]:
    return [*(f"--{name}" for name in options), *_ABOUT]


def _list_values(options: Mapping[str, Option]) -> dict[str, Sequence[str]]:
    """Return the fixed values of options that have some, by their flags."""
    fixed = {name: option.words for name, option in options.items() if option.words}
    return {f"--{name}": values for name, values in {PRESET: list_presets(), **fixed}.items()}


# --- bash and zsh ---------------------------------------------------------------------------------------------------


def _format_function(jobs: Jobs, words: Words) -> str:
    following = _format_case("verb", ((before, _offer(own)) for before, own in words.items()))
    options = _format_case("verb", ((verb, _format_job(job)) for verb, job in jobs.items()))
    return _FUNCTION.replace("{following}", following).replace("{options}", options)


def _format_job(job: Job[Any]) -> str:
    """Offer the options of a verb, or the values of the one before."""
    options = job.list_read()
    flags = ("[[ $cur == -* ]] && " if job.word else "") + _offer(_list_flags(options))  # verify begins with a path
    values = ((flag, _offer(own)) for flag, own in _list_values(options).items())
    return _format_case("option", [("", flags), *values])


def _format_case(variable: str, cases: Iterable[tuple[str, str]]) -> str:
    found: dict[str, list[str]] = {}  # by what is done
    for value, done in cases:
        found.setdefault(done, []).append(f'"{value}"')
    return "\n".join([f"case ${variable} in", *(f"{' | '.join(of)}) {done} ;;" for done, of in found.items()), "esac"])


def _offer(words: Sequence[str]) -> str:
    return f"offered+=({shlex.join(words)})"


# --- fish -----------------------------------------------------------------------------------------------------------


def _complete(after: Sequence[str], what: str, about: str) -> str:
    """Return the line that completes something after one of these words."""
    condition = _quote(f"__domext_after {' '.join(map(_quote, after))}")
    return f"complete -c domext -n {condition} {what}" + (f" -d {_quote(about)}" if about else "")


def _quote(text: str) -> str:
    """Return a text as one word of fish, which keeps a backslash and a quote only with a backslash before them."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
