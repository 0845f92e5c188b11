"""Every document: its commands are read by what they call, its names and links exist, and its English is plain.

Nothing is run. Bash reads the blocks of commands where none is installed, and records how it was asked to call them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from command_lines import load_jobs, read_ray_command
from conftest import REPOSITORY
from project_file import read_project_file

import domext_ray
from domext_ray.commands.help import format_help
from domext_ray.commands.job import Job
from domext_ray.commands.main import JOBS as VERBS
from domext_ray.commands.main import find_job
from domext_ray.config import presets
from domext_ray.config.options.build import CONFIG, PRESET, from_dict, read_flags
from domext_ray.config.options.kinds import list_options
from domext_ray.config.presets import find_preset
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.families.described_sets import read_description
from domext_ray.studies.sweep.space import read_space

PLACES = ("*.md", "[!.]*/README.md", ".github/*.md", ".github/guides/*.md", ".github/guides/*.ipynb")
PLACES += ("domext_ray/assets/*/README.md", "domext_ray/model/**/README.md")
DOCUMENTS = sorted({path for pattern in PLACES for path in REPOSITORY.glob(pattern)})
IDS = [str(path.relative_to(REPOSITORY)) for path in DOCUMENTS]
MOST_LINES = {"README.md": 210, "jobs/README.md": 420, ".github/guides/*.md": 125}
"""Of the front page and of each guide, which are read in one sitting, and of the reference."""
LANGUAGES = {"bash", "python", "yaml", "text", "bibtex"}
OUR_FOLDERS = ("cluster/", "jobs/", "tests/", "domext_ray/", ".ci/", ".github/")
IMAGE = "/opt/domext_ray/"
"""Where the image has the repository."""
FREE = set("cd docker git kubectl mlflow mypy pre-commit pytest ruff scancel tail tensorboard trackio".split())
"""Commands of others whose options are not looked at; the files of ours that they name are."""
REFUSED = {
    r"likewise": "in the same way",
    r"(?:is|are|was|were|be|been) told": "reports, warns, receives",
    r"(?:is|are) said\b(?! to)": "reports, states",
    r"go(?:es)? on|went on": "resumes, continues",
    r"that which": "a noun",
    r"in the place of": "instead of",
    r"any more": "no longer",
    r"counts? for nothing": "is ignored",
    r"(?:brings?|takes?|carry|carries) along": "contains",
    r"held to what": "compared with",
    r"(?:what|it|which) stands? (?:there|beside)|beside (?:it|them) stands?": "is, has",
    r"one of each": "a number and a noun",
    r"(?:a|one) (?!(?:of|in|on|to|for|per|at|by|as)\b)\w+ a (?:line|row|method|set|epoch|seed|layer|step)": "per",
    r"\w+, for (?:there|they|it|no \w+) (?:is|are|has|have|was|were|may|must|can|would|knows?)": "because",
    r"forgetting meter": "measure of forgetting",
    r"the (?:whole )?road of|the whole road": "the steps of",
    r"otherwise than|other than what": "differs from",
    r"(?-i:(?<=[.;:!?|-] )Of (?!course)\w+)": "the subject first",
}
"""Words of the house, and German in English words, that no document or help may have; and what to write instead."""
OTHERS_OPTIONS = {
    "--dashboard-agent-listen-port",
    "--help",
    "--help_all",
    f"--{CONFIG}",
    f"--{PRESET}",
    "--generate",
    "--head",
    "--runtime-env",
    "--signal",
    "--working-dir",
}
"""Options in running text that are no option of a job."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(REPOSITORY)}:{self.line}"


def read_document(path: Path) -> str:
    """Return a document; of a notebook its text, and then its code as one block."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    text, code = ("\n\n".join(source for source, own in cells if own == kind) for kind in ("markdown", "code"))
    return f"{text}\n\n```python\n{code}\n```\n"


def find_blocks(document: Path) -> Iterator[Block]:
    lines, start, language = read_document(document).splitlines(), -1, ""
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start < 0:
                start, language = number, line.removeprefix("```")
            else:
                yield Block(document, start + 2, language, "\n".join(lines[start + 1 : number]) + "\n")
                start = -1
    assert start < 0, f"{document}: a block without its end"


BLOCKS = [block for document in DOCUMENTS for block in find_blocks(document)]


JOBS = load_jobs()
RECORD = 'record() { printf "%s\\x1f" "$@" >>"$RECORD_FILE"; printf "\\x1e" >>"$RECORD_FILE"; }\n'


def list_commands(texts: Sequence[str], folder: Path) -> list[list[list[str]]]:
    """Return the commands of each text as bash calls them: variables filled in, words split, comments gone."""
    for place in re.findall(r"(?:^|&& )([\w.][\w.-]*/[\w./-]+)", "\n".join(texts), re.M):  # such as .venv/bin/pip
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        name = Path(place).name
        (folder / place).write_text(f'#!{shutil.which("bash")}\n{RECORD}record {name} "$@"\n', encoding="utf-8")
        (folder / place).chmod(0o700)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    script = f'{RECORD}cd() {{ record cd "$@"; }}\ncommand_not_found_handle() {{ record "$@"; }}\n'
    script += "".join(f'({text}\n)\nprintf "\\x1d" >>"$RECORD_FILE"\n' for text in texts)
    environment = {"PATH": "/nowhere", "RECORD_FILE": str(folder / "record"), "HOME": str(folder)}
    command = [str(shutil.which("bash")), "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if not texts:
        return []
    sections = (folder / "record").read_text(encoding="utf-8").split("\x1d")[:-1]
    return [[words.split("\x1f")[:-1] for words in section.split("\x1e")[:-1]] for section in sections]


def read_command(command: Sequence[str]) -> None:
    """Let a command be read by what it calls; an assertion, or the reader's own error, says what is wrong."""
    name, *words = command
    for word in words:
        place = word.removeprefix(IMAGE)
        if place.startswith(OUR_FOLDERS) and not re.search(r"[*\s]", place):
            assert (REPOSITORY / place).exists(), f"{place} is not there"
    if name == "python":
        read_python_command(words)
    elif name == "domext":
        read_verb(words)
    elif name == "pip":
        read_pip_command(words)
    elif name == "ray":
        verb, rest = read_ray_command(words)
        if verb in ("submit", "exec"):  # what it would run is read likewise
            read_command(rest[rest.index("--") + 1 :] if verb == "submit" else shlex.split(rest[1]))
    elif name == "sbatch":
        read_command(words[1:])
    elif name == "upgrade.sh":
        assert set(words) <= {"--list", "oldest", "newest", *(f"python3.{minor}" for minor in range(10, 14))}
    else:
        assert name in FREE, f"{name} is no command that this test knows"


def read_python_command(words: Sequence[str]) -> None:
    if words[0] == "-m":
        assert words[1] in ("venv", "pytest")
        return
    path = Path(words[0].removeprefix(IMAGE))
    assert (REPOSITORY / path).is_file()
    if path == Path("jobs/benchmark.py"):
        read_benchmark(path, words[1:])
    elif path.parts[0] == "jobs":
        read_job_options(JOBS[path.stem], list(words[1:]))


def read_verb(words: Sequence[str]) -> None:
    if words[0] == "presets":
        assert not words[1:] or (words[1] == "show" and find_preset(words[2]).is_file())
    elif not {"--help", "--version"} & set(words):
        job, rest = find_job(words)
        read_job_options(job, list(rest))


def read_benchmark(path: Path, options: Sequence[str]) -> None:
    made = runpy.run_path(str(REPOSITORY / path))["parse_options"](list(options))
    assert isinstance(made, argparse.Namespace)


def read_job_options(job: Job[Any], options: list[str]) -> None:
    """Let a job read its options, with a bucket of theirs; one that it does not use would get a warning."""
    options = [option.replace("://BUCKET/", "://bucket/") for option in options]
    if {"--help", "--help_all"} & set(options):
        return
    options = [f"--{job.word}", *options] if job.word and not options[0].startswith("-") else options
    file = read_flags(job.config_class, options).config
    if file.startswith("runs/"):  # an earlier command's
        place = options.index(f"--{CONFIG}")
        del options[place : place + 2]
    presets.configure(job.config_class, job.preset, read_flags(job.config_class, options))
    unused = [name for name in read_flags(job.config_class, options).settings if job.is_unused(name)]
    assert not [name for name in unused if not name.startswith(("shape.", "vocab.lowercase"))]


def read_pip_command(words: Sequence[str]) -> None:
    assert words[0] == "install"
    extras = read_project_file()["project"]["optional-dependencies"]
    for word in words[1:]:
        found = re.search(r"^(?:\.|domext_ray)\[(.*)\]", word)
        assert not found or set(found[1].split(",")) <= extras.keys(), word


@pytest.mark.parametrize("pattern", MOST_LINES)
def test_a_page_is_no_longer_than_it_may_be(pattern: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in REPOSITORY.glob(pattern)}
    assert lengths and not {path: length for path, length in lengths.items() if length > MOST_LINES[pattern]}


def read_section(name: str, title: str) -> str:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{name}: {title}"
    return found[1]


def test_figures_of_the_front_page_are_those_of_the_results() -> None:
    """Each with its spread or interval; and the quick start ended as it says there."""
    source = read_section(".github/RESULTS.md", "From bits to F1")
    for page, title in {"README.md": "Results", ".github/METHODS.md": "Gain and forgetting"}.items():
        table = re.sub(r"\*\*", "", "".join(re.findall(r"^\|.*\n", read_section(page, title), re.M)))
        figures = re.findall(r"[−+]?\d+\.\d+(?: ± \d+\.\d+| \[[^\]]*\])?", table)
        assert len(figures) > 5 and not [figure for figure in figures if figure not in source], page
    (ended,) = re.findall(r"^```text\n.*?^```", read_section("README.md", "Two commands"), re.M | re.S)
    assert ended in read_section(".github/RESULTS.md", "Quick start")


def test_blocks_say_their_language() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, block


def write_shown_files(document: Path, folder: Path) -> dict[str, str]:
    """Write each YAML that a document shows under its name, its first line; return where, by name."""
    texts = [snippet.text for snippet in BLOCKS if snippet.document == document and snippet.language == "yaml"]
    named = {found[1]: text for text in texts if (found := re.match(r"# (\S+\.yaml)\n", text))}
    for name, text in named.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {name: str(folder / name) for name in named}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_command_is_read_by_what_it_calls(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [snippet for snippet in BLOCKS if snippet.document == document and snippet.language == "bash"]
    commands = list_commands([snippet.text for snippet in blocks], tmp_path)
    assert all(commands)
    files = write_shown_files(document, tmp_path)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(REPOSITORY / "jobs")
    for block, own in zip(blocks, commands, strict=True):
        for command in own:
            try:
                read_command([files.get(word, word) for word in command])
            except (AssertionError, ValueError, click.ClickException) as error:
                raise AssertionError(f"{block}: {shlex.join(command)}") from error


def test_every_example_of_a_verbs_help_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [re.findall(r"^ +(domext (?:.*\\\n)*.*)", job.about, re.M) for job in VERBS.values()]
    found = list_commands(["\n".join(own).replace(" …", "") for own in examples], tmp_path)
    monkeypatch.chdir(REPOSITORY)
    for verb, commands in zip(VERBS, found, strict=True):
        assert [words for words in commands if find_job(words[1:])[0].verb == verb], verb
        for command in commands:
            read_command(command)


def test_a_wrong_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "python jobs/pretrain_af.py --method.headz 3": "--method.headz is no option",
        "python jobs/finetune.py --grid.lr fast": "--grid.lr is 'fast'",
        "python jobs/prepare_corpus.py --method.heads 2": "method.heads",
        "python jobs/nothing.py": "jobs/nothing.py is not there",
        "domext pretrain af --method.headz 3": "--method.headz is no option",
        "domext finetun": "did you mean finetune?",
        "domext presets show nothing": "'nothing' is no preset",
        "sbatch cluster/slurm.sbatch python jobs/sweep.py --trials 3": "--trials is no option",
        'JOB="python jobs/pretrain_af.py --corpse x"\nray job submit -- $JOB': "--corpse is no option",
        "ray job submit --no-weight -- python jobs/sweep.py": "--no-weight",
        "kubectl apply -f cluster/kuberay/none.yaml": "none.yaml is not there",
        'pip install -e ".[nothing]"': "nothing",
        "rm -rf /": "rm is no command",
    }
    found = list_commands([*wrong], tmp_path)
    monkeypatch.chdir(REPOSITORY)
    for commands, says in zip(found, wrong.values(), strict=True):
        with pytest.raises((AssertionError, ValueError, click.ClickException), match=re.escape(says)):
            for command in commands:
                read_command(command)


def test_every_name_that_is_imported_is_there() -> None:
    """Names of this package are also called with arguments that they take."""
    for block in BLOCKS:
        if block.language == "python":
            check_names(block)


def check_names(block: Block) -> None:
    ours: dict[str, Any] = {}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                ours[alias.asname or alias.name] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                ours[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(ast.parse(block.text)):
        if not isinstance(node, ast.Call):
            continue
        path = ast.unparse(node.func).split(".")
        if path[0] in ours and all(part.isidentifier() for part in path):
            called = ours[path[0]]
            for name in path[1:]:
                called = getattr(called, name)
            is_plain = not any(isinstance(arg, ast.Starred) for arg in node.args)
            if is_plain and getattr(called, "__module__", "").startswith("domext_ray"):
                inspect.signature(called).bind(
                    *node.args, **{keyword.arg: None for keyword in node.keywords if keyword.arg}
                )


def test_the_front_page_names_every_function() -> None:
    (sentence,) = re.findall(r"^In a notebook .* are functions:$", read_document(REPOSITORY / "README.md"), re.M)
    functions = {name for name in domext_ray.__all__ if inspect.isfunction(getattr(domext_ray, name))}
    assert {*re.findall(r"`(\w+)`", sentence)} == functions


def test_every_yaml_is_read(tmp_path: Path) -> None:
    for block in BLOCKS:
        values = yaml.safe_load(block.text) if block.language == "yaml" else {}
        if "space" in values:
            assert read_space(values["space"]).dimensions
        elif "task" in values:
            (tmp_path / "mine.yaml").write_text(block.text, encoding="utf-8")
            assert read_description(tmp_path / "mine.yaml").task == values["task"]
        elif "mixture" in values:
            assert from_dict(PretrainConfig, values).parts
        else:
            assert block.language != "yaml", f"{block}: no reader is known for it"


def strip_blocks(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", read_document(document), flags=re.M | re.S)


def test_every_option_in_running_text_is_one() -> None:
    known = {f"--{option}" for job in JOBS.values() for option in list_options(job.config_class)}
    verbs = [REPOSITORY / "jobs" / "benchmark.py", *(REPOSITORY / "jobs" / "benchmarks").glob("*.py")]
    known_elsewhere = {flag for path in verbs for flag in re.findall(r'"(--\w+)"', path.read_text())} | OTHERS_OPTIONS
    for document in DOCUMENTS:
        codes = re.findall(r"`([^`]+)`", strip_blocks(document))
        named = {flag.rstrip(".") for code in codes for flag in re.findall(r"(?<!\S)--[a-z][\w.-]*", code)}
        unknown = named - known - known_elsewhere
        assert not {flag for flag in unknown if not any(other.startswith(f"{flag}.") for other in known)}, document


def find_anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", strip_blocks(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_into_the_repository_leads_somewhere() -> None:
    for document in DOCUMENTS:
        text = strip_blocks(document)
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
        for target in targets:
            if re.match(r"\w+:", target):
                continue
            place, _, anchor = target.partition("#")
            path = (document.parent / place).resolve() if place else document
            assert path.exists(), f"{document}: {target} leads nowhere"
            assert not anchor or anchor in find_anchors(path), f"{document}: {target}: no such heading"


def test_forms_and_the_workflow_are_complete() -> None:
    forms = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 3
    for form in (yaml.safe_load(path.read_text(encoding="utf-8")) for path in forms):
        assert form.keys() == {"name", "description", "labels", "body"}
        names = [part["id"] for part in form["body"]]
        assert len(set(names)) == len(names)
        assert all(part["type"] in ("textarea", "checkboxes") and part["attributes"]["label"] for part in form["body"])
    (workflow,) = (REPOSITORY / ".github" / "workflows").glob("*.yml")
    (job,) = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_the_tiers_that_are_run_every_week_are_there() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "tiers.yaml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True].keys() == {"schedule", "workflow_dispatch"}, "YAML reads the word on as true"
    tier, newest = (workflow["jobs"][name] for name in ("tier", "newest"))
    markers = {marker.partition(":")[0] for marker in read_project_file()["tool"]["pytest"]["ini_options"]["markers"]}
    assert {*tier["strategy"]["matrix"]["tier"]} == markers - {"gpu"}
    install, tested = (step["run"] for step in tier["steps"] if "run" in step)
    assert f"INSTALL='{install}'" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^pytest -m \$\{\{ matrix.tier \}\} ", tested, re.M) and tier["steps"][3]["shell"] == "bash"
    assert [step["run"] for step in newest["steps"] if "run" in step] == ["tests/upgrade.sh newest"]
    for job in (tier, newest):
        assert job["timeout-minutes"] > 60
        assert job["steps"][-1]["if"] == "always()" and "upload-artifact@" in job["steps"][-1]["uses"]


def test_tables_of_speed_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "jobs")
    tables = importlib.import_module("benchmarks.output")
    tables.run_tables(argparse.Namespace(check=True))


def test_badges_are_true() -> None:
    project = read_project_file()["project"]
    python, licence = ((REPOSITORY / ".github" / f"{name}.svg").read_text() for name in ("python", "licence"))
    tested = (REPOSITORY / ".ci" / "run").read_text()
    oldest = project["requires-python"].removeprefix(">=")
    *_, newest = (classifier.split()[-1] for classifier in project["classifiers"] if "Python :: 3." in classifier)
    assert f"{oldest}+, tested to {newest}<" in python and f"${{PYTHON:-python{oldest}}}" in tested
    assert f">{project['license']}<" in licence


def test_every_job_and_every_room_has_its_row() -> None:
    jobs = (REPOSITORY / "jobs" / "README.md").read_text(encoding="utf-8")
    verbs = dict(re.findall(r"^\| `(\w+)\.py` \| (.*?) \|", jobs, re.M))
    assert verbs == {**{name: f"`{job.verb}`" for name, job in JOBS.items()}, "benchmark": "–"}
    rows = re.findall(r"^\| (`.*?) \|", (REPOSITORY / "domext_ray" / "README.md").read_text(encoding="utf-8"), re.M)
    package = REPOSITORY / "domext_ray"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    rooms |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row)} == rooms


def find_refused(text: str) -> dict[str, str]:
    """Return the refused words of a text outside of its code, and what to write instead."""
    words = re.sub(r"`[^`]*`", "`", " ".join(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split()))
    found = {pattern: re.findall(rf"\b(?:{pattern})\b", words, re.I) for pattern in REFUSED}
    return {match: REFUSED[pattern] for pattern, matches in found.items() for match in matches}


def test_english_of_documents_help_and_pages_is_plain() -> None:
    assets = REPOSITORY / "domext_ray" / "assets"
    pages = {*DOCUMENTS, *assets.glob("*.md"), *assets.glob("*.html"), *assets.glob("sets/*/README.md")}
    texts = {str(path.relative_to(REPOSITORY)): read_document(path) for path in pages}
    texts[".github/CHANGELOG.md"], *_ = texts[".github/CHANGELOG.md"].split("\n## 0.1.0")  # released as it was written
    texts |= {f"domext {verb} --help_all": format_help(job, is_full=True) for verb, job in VERBS.items()}
    assert not {name: refused for name, text in texts.items() if (refused := find_refused(text))}


def test_what_is_not_plain_is_found() -> None:
    """Every sentence that documents had is found, every pattern finds one, and plain sentences are left alone."""
    wrong = """
    Views likewise. | A base whose entries are lost is told. | How many of them the text never has is said.
    The same command goes on where it stopped. | The tracker that which was added gets them.
    In the place of flags. | A run has no parts any more. | A slash at the end counts for nothing.
    The six files that an export brings along. | The model is held to what its base predicts.
    With vectors another figure is what stands there. | A graph and a bank, one of each. | A text a line.
    It waits, for there is no base to keep. | Sentences of the forgetting meter. | The road of a training job.
    Dropout draws otherwise than golden files. | A proxy limits requests, for it knows the client.
    Two files. Of a run that has ended also config.yaml.
    """
    sentences = [sentence.strip() for sentence in re.split(r"[|\n]", wrong) if sentence.strip()]
    assert [sentence for sentence in sentences if not find_refused(sentence)] == []
    assert {*find_refused(wrong).values()} == {*REFUSED.values()}
    right = "The same command resumes it. `likewise` is code. Of course. A part of a run, for each row. Go only there."
    assert find_refused(right) == {}
