"""Every command of a document that names a bucket, as it stands there, against an S3 server.

The bucket's name alone is another one. Where a command trains, options that make it small follow.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import load_jobs
from conftest import FEW_SENTENCES, REPOSITORY, WORDS
from object_store import KEYS, make_bucket, put_object
from test_documents import BLOCKS, DOCUMENTS, list_commands, strip_blocks

from domext_ray.commands.main import JOBS, find_job, main
from domext_ray.config import presets
from domext_ray.config.options.declare import TEXTS
from domext_ray.config.options.kinds import list_options
from domext_ray.storage import Place, is_address
from domext_ray.text.data.files import find_files

NAMED = re.compile(r"s3://(bucket|BUCKET)\b")
VERBS_OF_OPTIONS = {"bank": "bank"}
"""Where the running text names an option alone, the job that has it; of others it is pre-training."""
BUCKET = "s3://documents"
"""What documents call s3://BUCKET or s3://bucket; nothing else is in it."""
SMALL = {
    "pretrain af": (
        *("--train.max_steps", "4", "--train.global_batch_size", "8", "--train.seq_length", "32"),
        *("--train.eval_rows", "16", "--train.general_probe", str(FEW_SENTENCES), "--method.ffn_units", "8"),
        *("--engine.precision", "fp32", "--scale.use_gpu", "false", "--replay.corpus", "none"),
    ),
    "predict": ("--scale.use_gpu", "false", "--scale.workers", "1"),
    "embed": ("--scale.use_gpu", "false"),
}
"""What follows a command of a verb."""


def unwrap(command: Sequence[str]) -> list[str]:
    """The verb and the options of the job that a command starts, here or on a cluster; empty: it starts none."""
    words = list(command)
    if words[:2] == ["ray", "exec"]:
        words = shlex.split(words[3])
    if words[:1] == ["ray"]:
        words = words[words.index("--") + 1 :] if "--" in words else []
    words = words[2:] if words[:1] == ["sbatch"] else words
    if words[:1] == ["python"] and "jobs/" in words[1]:
        return [*load_jobs()[Path(words[1]).stem].verb.split(), *words[2:]]
    return words[1:] if words[:1] == ["domext"] else []


def find_commands(folder: Path) -> list[list[str]]:
    """Verbs and options of all that names a bucket in blocks, in running text and in the verbs' help, each once."""
    blocks = [block.text for block in BLOCKS if block.language == "bash" and NAMED.search(block.text)]
    helps = [
        re.sub(" …", "", command) for job in JOBS.values() for command in re.findall(r"^ +(domext .*)", job.about, re.M)
    ]
    texts = [*blocks, *(command for command in helps if NAMED.search(command))]
    found = [unwrap(command) for section in list_commands(texts, folder) for command in section]
    spans = [span for path in DOCUMENTS for span in re.findall(r"`--([^`]*)`", strip_blocks(path))]
    for name, *values in (span.split() for span in spans if NAMED.search(span)):
        found.append([*VERBS_OF_OPTIONS.get(name, "pretrain af").split(), f"--{name}", *values])
    found += [["export", "hf", "--run", address] for address in re.findall(r"--run may be (s3://\S+)", "".join(blocks))]
    named = [[NAMED.sub(BUCKET, word) for word in words] for words in found if NAMED.search(" ".join(words))]
    return [*map(list, dict.fromkeys(map(tuple, named)))]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    found = find_commands(tmp_path_factory.mktemp("record"))
    shown = {" ".join(words) for words in found}
    assert {f"pretrain af --corpus {BUCKET}/texts/", f"verify {BUCKET}/runs/af/export"} <= shown, shown
    assert len({find_job(words)[0].verb for words in found}) >= 6, "all kinds of commands are among them"
    return found


@pytest.fixture
def bucket(objects: str) -> str:
    """The server's address; its bucket has texts, with the object that a console leaves in their folder."""
    name = BUCKET.removeprefix("s3://")
    make_bucket(objects, name)
    text = "".join(f"the {a} and the {b} of a {c}.\n" for a, b, c in zip(WORDS, WORDS[3:], WORDS[7:], strict=False))
    for folder in ("texts", "notes"):
        put_object(objects, f"{folder}/", b"", name)
        put_object(objects, f"{folder}/a.txt", text.encode() * 3, name)
    return objects


def test_each_is_read_and_its_places_are_found(commands: list[list[str]], bucket: str) -> None:
    for words in commands:
        job, rest = find_job(words)
        given = job.read(rest)
        presets.configure(job.config_class, job.preset, given)
        options, asked = list_options(job.config_class), 0
        for name, setting in given.settings.items():
            if TEXTS in options[name].tags and is_address(setting.value):
                assert find_files(setting.value)[0], words
                asked += 1
            elif is_address(setting.value):
                Place(setting.value).list_names()
                asked += 1
        assert asked, words


def run(words: Sequence[str]) -> None:
    """Run a verb with what makes it small."""
    main([*words, *SMALL.get(find_job(words)[0].verb, ())])


def run_file(words: Sequence[str], folder: Path, address: str) -> None:
    """Run a training's file in jobs/ as a process, as a document has it."""
    env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": address, "HOME": str(folder)}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(REPOSITORY / "jobs" / f"pretrain_{words[1]}.py"), *words[2:], *SMALL["pretrain af"]]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.jobs
@pytest.mark.timeout(3600)
def test_each_does_its_work(
    commands: list[list[str]],
    bucket: str,
    local_ray: None,
    tiny_base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of a project: train, train again, and use what was trained."""
    monkeypatch.chdir(tmp_path)
    base = ("--base", str(tiny_base_folder))
    for number, words in enumerate(command for command in commands if command[0] == "pretrain"):
        name = () if "--run.name" in words or not number else ("--run.name", f"run-{number}")
        runs = () if "--run.dir" in words else ("--run.dir", f"{BUCKET}/runs")
        corpus = () if "--corpus" in words else ("--corpus", f"{BUCKET}/texts/")
        own = [*words, *runs, *corpus, *name, *base]
        if not number:
            run_file(own, tmp_path, bucket)
        run(own)
        said = capsys.readouterr().out
        assert (f"export: {BUCKET}/runs/" if number else "nothing is left to do") in said, words
    for place in ("bank", f"{BUCKET}/bank"):
        run(("bank", "--bank", place, "--add", f"{BUCKET}/runs/af", "--name", "clinic"))
    # The workers of a Ray that runs already are in another folder: models have their whole paths.
    models = {"embed": ("--model", str(tiny_base_folder)), "predict": ("--model", f"{tmp_path}/bank:clinic")}
    for words in (command for command in commands if command[0] != "pretrain"):
        capsys.readouterr()
        run([*words, *models.get(words[0], ())])
        assert capsys.readouterr().out.strip(), words
    assert [*(tmp_path / "filled").rglob("*.jsonl")] and [*(tmp_path / "vectors").rglob("*.npy")]
