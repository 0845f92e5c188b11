"""What `domext verify` does: look at every file of a place with the readers that jobs use, and change nothing.

Enters: a run, a corpus, a vocabulary, a bank or an export. Leaves: a table of its parts, and a sentence per damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.jobs import VerifyConfig
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import DomextError, RunError, StorageError, name_file
from domext_ray.export.folder import (
    ADAPTERHUB,
    MARKER,
    ONNX,
    PEFT,
    check_whole,
    find_faults,
    is_export,
    read_export_record,
)
from domext_ray.files import read_json
from domext_ray.finetuning.finetuned import read_finetune_summary
from domext_ray.models.bank import BANK, AdapterBank
from domext_ray.report.summary import read_summary
from domext_ray.report.tables import format_text
from domext_ray.runs.run_directory import CONFIG, RUN, TRAININGS, read_config, read_run
from domext_ray.storage import Place, hash_file
from domext_ray.text.corpus.manifest import MANIFEST, SPLITS, describe_fault, list_hashes, read_manifest
from domext_ray.text.vocabulary.extension import RECORD_FILE, load_extension
from domext_ray.training.checkpoint import Checkpoint, check_all

_REMEDY = "bring back a copy of it"
Finding = tuple[str, str, list[str]]
"""Name of a part, what it is, and a sentence per damage."""


def run_verify(config: VerifyConfig) -> None:
    """Print what a place is and how its parts are; a RunError tells of damage, or that it is none of these."""
    place, findings = Place(config.path), list[Finding]()
    marker, kind, check = next((row for row in _KINDS if (place / row[0]).is_file()), ("", "", None))
    if check is None:
        names = ", ".join(name for name, *_ in _KINDS)
        raise RunError(f"{place} is no run, corpus, vocabulary, bank or export: it has none of {names}.")
    try:
        findings.extend(check(place))
    except StorageError:  # of which nothing is known
        raise
    except DomextError as error:  # what says which parts there are
        findings.append((marker, "", [str(error)]))
    rows = [(part, what, "damaged" if faults else "whole") for part, what, faults in findings]
    print(f"{kind}: {place}\n{format_text([('part', 'content', 'state'), *rows], num_texts=3)}")
    damages = [fault for *_, faults in findings for fault in faults]
    if damages:
        print("\n".join(damages))
        raise RunError(f"{place} is damaged: {len(damages)} of its files or parts, named above.")


def _look(part: str, what: str, read: Callable[..., Any], *args: Any) -> Finding:
    """Let a reader read a part; what it returns is what the part is, unless `what` says it."""
    try:
        found = read(*args)
        return part, what or found, []
    except StorageError:
        raise
    except DomextError as error:
        return part, what, [str(error)]


def _check_bank(place: Place) -> Iterator[Finding]:
    bank = AdapterBank.open(place)
    yield _look("base", bank.base_id, lambda: bank.base)
    for name in bank.names():
        yield _look(f"adapters/{name}", "", lambda name: bank.read_adapter(name)[0].architecture, name)


def _check_export(place: Place, part: str = "export") -> Iterator[Finding]:
    check_whole(place)
    record = read_export_record(place)
    assert record is not None, "it has its marker, and is whole"
    yield part, f"{record.kind}, {len(record.files)} files", list(find_faults(place, record))


def _check_vocabulary(place: Place, part: str = "vocabulary") -> Iterator[Finding]:
    def read() -> str:
        made = load_extension(place.local())
        return f"{len(made.words):,} new words of {made.base}" if made else "no new words"

    yield _look(part, "", read)
    yield from _check_files(place, [name for name in place.list_files() if name != RECORD_FILE], part)


def _check_corpus(place: Place) -> Iterator[Finding]:
    manifest, faults = read_manifest(place), dict[str, list[str]]()
    for file, sha256 in list_hashes(manifest).items():
        is_whole = file.is_file() and hash_file(file.local()) == sha256
        faults[str(file)] = [] if is_whole else [f"{describe_fault(file)}; delete the folder and prepare it again."]
    for split in SPLITS:
        shards, rows = manifest.shards(split), manifest.num_rows(split)
        damages = [fault for shard in shards for fault in faults.pop(shard.path)]
        yield split, f"{len(shards)} shards, {rows:,} rows, {manifest.num_tokens(split):,} tokens", damages
    yield "text and counts", f"{len(faults)} files", [fault for own in faults.values() for fault in own]


def _check_run(place: Place) -> Iterator[Finding]:
    is_tuned = (place / TRAININGS).is_dir()
    kind = "options of fine-tuning" if is_tuned else "options of pre-training"
    yield _look(CONFIG, kind, read_config, place, FinetuneConfig if is_tuned else SettledConfig)
    yield _look(RUN, "what it is recognised by", read_run, place)
    for path, found in check_all(place / "checkpoints"):
        if isinstance(found, Checkpoint):
            waits = "" if found.unevaluated is None else "; the run evaluates it when it goes on"
            yield f"checkpoints/{path.name}", f"step {found.step:,}, {len(found.files)} files{waits}", []
        else:
            yield f"checkpoints/{path.name}", "", [f"checkpoint {path} is damaged ({found}); a run passes it over."]
    if (place / "tokenizer").is_dir():
        yield from _check_vocabulary(place / "tokenizer", "tokenizer")
    if (place / "summary.json").is_file():
        read = (lambda path: read_finetune_summary(path.parent.local())) if is_tuned else read_summary
        yield _look("summary.json", "figures", read, place / "summary.json")
    exports = [name for name in ("export", ADAPTERHUB, PEFT, ONNX) if is_export(place / name)]
    for name in exports:
        yield from _check_export(place / name, name)
    seen = (RUN, "summary.json", "checkpoints/", "tokenizer/", *(f"{name}/" for name in exports))
    yield from _check_files(place, [name for name in place.list_files() if not name.startswith(seen)], "other")


def _check_files(place: Place, names: Iterable[str], part: str) -> Iterator[Finding]:
    """Look at JSON and tensors of which nothing says what they must be."""
    for ending, what, read in (
        (".json", "JSON", lambda path: read_json(path, _REMEDY)),
        (".safetensors", "tensors", _read_header),
    ):
        found = [name for name in names if name.endswith(ending)]
        faults = [fault for name in found for fault in _look(name, what, read, place / name)[2]]
        if found:
            yield f"{part} *{ending}", f"{len(found)} files of {what}", faults


def _read_header(path: Place) -> None:
    try:
        with name_file(path):
            safe_open(path.local(), "pt")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} is damaged ({error}); {_REMEDY}.") from error


_KINDS: tuple[tuple[str, str, Callable[[Place], Iterator[Finding]]], ...] = (
    (BANK, "bank of adapters", _check_bank),
    (MARKER, "export", _check_export),
    (RECORD_FILE, "vocabulary", _check_vocabulary),
    (CONFIG, "run", _check_run),
    (RUN, "run", _check_run),
    (MANIFEST, "prepared corpus", _check_corpus),
)
"""A file that only one kind of place has, what that kind is called, and what looks at it."""
