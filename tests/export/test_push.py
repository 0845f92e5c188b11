"""Exports go to a hub on this machine: what is said before, which files arrive, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from job_calls import call_job
from small_hub import TOKEN, SmallHub, run_small_hub

from domext_ray.config.jobs import ExportConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.export.folder import FINE_TUNED, MARKER, ExportRecord, new_export
from domext_ray.export.push import describe_push, push_export
from domext_ray.storage import Place

REPO = "clinic-org/clinic.bert"
FILES = {
    "README.md": b"---\nlicense: apache-2.0\n---\n\n# A model\n" + b"text\n" * 30,
    "config.json": b"{}\n",
    "model.safetensors": bytes(range(256)) * 2000,
    "1_Pooling/config.json": b'{"mean": true}\n',
    "empty.txt": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A hub that the environment names, with a token for it."""
    with run_small_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def write_export(folder: Path, parts: tuple[str, ...] = (".",)) -> Path:
    with new_export(Place(folder), ExportRecord(FINE_TUNED)) as temporary:
        for path, content in ((temporary / part / name, data) for part in parts for name, data in FILES.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


def read_files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_nothing_leaves_before_it_is_asked_for(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_export(tmp_path / "export")
    done = call_job("export_hf", "--run", str(folder), "--push", REPO)
    assert done.code == 0 and not hub.calls, done.err
    assert f"{hub.url}/{REPO} (private) would get 6 files, 0.5 MB:" in done.out
    assert "  512,000 bytes  model.safetensors\n" in done.out and "        0 bytes  empty.txt\n" in done.out
    assert "README.md begins:\n  ---\n  license: apache-2.0\n" in done.out and done.out.count("  text\n") == 7
    assert "Nothing was uploaded; --push_now true uploads (HF_TOKEN is set)." in done.out and TOKEN not in done.out
    monkeypatch.delenv("HF_TOKEN")
    done = call_job("export_hf", "--run", str(folder), "--push", REPO, "--push_private", "false")
    assert "(public: everybody sees it)" in done.out and "(HF_TOKEN is not set, and the upload needs it)" in done.out


def test_the_files_arrive_as_they_are(hub: SmallHub, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    done = call_job("export_hf", "--run", str(folder), "--push", REPO, "--push_now", "true")
    assert done.code == 0, done.err
    assert f"uploaded: {hub.url}/{REPO}/commit/" in done.out and TOKEN not in done.out + done.err
    assert hub.files[REPO] == read_files(folder, (*FILES, MARKER)) and hub.private == {REPO: True}
    assert list(hub.objects.values()) == [FILES["model.safetensors"]] and hub.tokens == {f"Bearer {TOKEN}"}
    push_export(Place(folder), REPO, is_private=True)
    assert hub.calls.count("POST /api/repos/create") == 1, "it is there the second time"
    push_export(Place(folder), "clinic-org/open", is_private=False)
    assert not hub.private["clinic-org/open"]


def test_a_task_of_several_models_goes_with_all_of_them(hub: SmallHub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "trainings").mkdir(parents=True)
    parts = ("entities", "relations")
    write_export(run / "export", parts)
    done = call_job("export_hf", "--run", str(run), "--push", REPO, "--push_now", "true")
    assert done.code == 0, done.err
    names = (*(f"{part}/{name}" for part in parts for name in FILES), MARKER)
    assert hub.files[REPO] == read_files(run / "export", names)
    (run / "export" / "notes.txt").write_text("private", encoding="utf-8")
    with pytest.raises(RunError, match=r"notes\.txt: no part of the export"):
        describe_push(Place(run / "export"), REPO, is_private=True)


def test_a_model_goes_to_no_repository_that_others_see(hub: SmallHub, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    hub.private.update({REPO: False, "clinic-org/shut": True})
    for repo, is_private, message in (
        (REPO, True, r"--push_private is True, and .* is there and public; give --push_private false, or another name"),
        ("clinic-org/shut", False, r"--push_private is False, and .* is there and private"),
    ):
        with pytest.raises(ConfigError, match=message):
            push_export(Place(folder), repo, is_private=is_private)
    assert not hub.files and not hub.objects


def test_what_is_no_part_of_the_export_is_not_uploaded(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    (folder / "notes.txt").write_text("private", encoding="utf-8")
    with pytest.raises(RunError, match=r"notes\.txt: no part of the export"):
        describe_push(Place(folder), REPO, is_private=True)
    (folder / "notes.txt").unlink()
    (folder / "config.json").write_text("{1}", encoding="utf-8")
    with pytest.raises(RunError, match=r"config\.json: changed since it was exported"):
        describe_push(Place(folder), REPO, is_private=True)
    (folder / "config.json").unlink()
    with pytest.raises(RunError, match=r"config\.json: it is part of the export, and is missing"):
        describe_push(Place(folder), REPO, is_private=True)
    with pytest.raises(RunError, match=r"holds no export of this project"):
        describe_push(Place(tmp_path / "nothing"), REPO, is_private=True)


def test_what_the_hub_refuses_is_one_sentence(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_export(tmp_path / "export")
    command = ("export_hf", "--run", str(folder), "--push", REPO, "--push_now", "true")

    def refuse(message: str) -> None:
        done = call_job(*command)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
        assert not hub.files

    monkeypatch.setenv("HF_TOKEN", "hf_another")
    refuse(f"{hub.url}/{REPO} refuses the token in HF_TOKEN (401); give one that may write there.")
    monkeypatch.delenv("HF_TOKEN")
    refuse("the environment has no HF_TOKEN; set it to a token that may write to clinic-org")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    refuse("http://127.0.0.1:1/clinic-org/clinic.bert cannot be reached or read (ConnectError: ")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuse("HF_HUB_OFFLINE keeps huggingface_hub off the network; unset it to upload.")


def test_options_outside_their_rules_are_refused() -> None:
    for name in ("bert", "a/b/c", "a/", "/b", "a b/c", "a/b--c", "a/..b", "a/b.git", "a/-b", "a/" + "b" * 95):
        with pytest.raises(ConfigError, match=r"--push is .*; it must be ORG/NAME"):
            ExportConfig(run="runs/af", push=name)
    with pytest.raises(ConfigError, match=r"--push_now is True; it must be false without --push ORG/NAME"):
        ExportConfig(run="runs/af", push_now=True)
    ExportConfig(run="runs/af", push="A-b_c/d.e-1", push_now=True)


def test_an_export_is_pushed_as_it_is(tmp_path: Path) -> None:
    done = call_job("export_hf", "--run", str(write_export(tmp_path / "e")), "--push", REPO, "--dtype", "float16")
    assert done.code == 2 and "--dtype is 'float16'; it must be left out with --push: " in done.err
