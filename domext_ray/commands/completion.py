"""The verbs and their options -> a script with which bash completes command lines at a Tab, and starts no Python.

All words are in the script, so a new version needs a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from domext_ray.commands.help import ALL, FEW
from domext_ray.commands.job import Job
from domext_ray.config.options.build import CONFIG, PRESET
from domext_ray.config.presets import list_presets

_SCRIPT = """# Completes command lines of domext in bash; printed by domext completion bash.
_domext() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} verb="" option="" word="" words=""
    if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD - 2]}; fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD - 1}"; do
        [[ $word == -* ]] && break
        verb+=${verb:+ }$word
    done
    if [[ $word != -* ]]; then # no option stands there yet
{following}
    fi
    [[ $prev == --* && $cur != -* ]] && option=$prev # whose value is completed
{options}
    mapfile -t COMPREPLY < <(compgen -P "${cur%"${cur##*,}"}" -W "$words" -- "${cur##*,}")
}
complete -o default -F _domext domext # default: names of files where no word is offered
"""


def format_bash(jobs: Mapping[str, Job[Any]], words: Mapping[str, Sequence[str]]) -> str:
    """Return the script; `words` are those that may follow words: the first ones, and the second ones of verbs."""
    following = _format_case("verb", ((before, _offer(own)) for before, own in words.items()))
    options = _format_case("verb", ((verb, _format_job(job)) for verb, job in jobs.items()))
    return _SCRIPT.replace("{following}", following).replace("{options}", options)


def _format_job(job: Job[Any]) -> str:
    """Offer the options of a verb, or the values of the one before."""
    options = job.list_read()
    flags = [*(f"--{name}" for name in (*options, PRESET, CONFIG)), FEW[0], *ALL]
    of_flags = ("[[ $cur == -* ]] && " if job.word else "") + _offer(flags)  # verify begins with a path
    values = {PRESET: list_presets(), **{name: option.words for name, option in options.items() if option.words}}
    return _format_case("option", [("", of_flags), *((f"--{name}", _offer(own)) for name, own in values.items())])


def _format_case(variable: str, cases: Iterable[tuple[str, str]]) -> str:
    found: dict[str, list[str]] = {}  # by what is done
    for value, done in cases:
        found.setdefault(done, []).append(f'"{value}"')
    return "\n".join([f"case ${variable} in", *(f"{' | '.join(of)}) {done} ;;" for done, of in found.items()), "esac"])


def _offer(words: Sequence[str]) -> str:
    return f'words+=" {" ".join(words)}"'
