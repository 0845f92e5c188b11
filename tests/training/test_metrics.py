"""The run's record: cut back on resume, fenced against an older attempt, readable after a crash."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from object_store import BUCKET, Proxy, use_objects
from small_runs import read_records

from domext_ray.config.pretrain import TrainConfig
from domext_ray.errors import RunError
from domext_ray.runs.attempts import supersede
from domext_ray.runs.events import notify_driver
from domext_ray.storage import Place
from domext_ray.training import metrics as metrics_module
from domext_ray.training.metrics import MetricsLog, RunProgress

SPEED = {"time/step_seconds": 0.1, "time/seconds": 0.1, "throughput/tokens_per_second": 10.0, "train/tokens": 1}


def read_steps(run: Path) -> list[int]:
    return [record["step"] for record in read_records(run)]


def test_resuming_cuts_the_file_back_to_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    for step in range(8):
        log.write({"step": step, "train/mlm_loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:  # damage, and where the process died
        file.write(b'null\n[1]\n{"no": 1}\n\0\0\0\n\xff\xfe\n{"step": 8, "train/ml')
    log = MetricsLog(supersede(Place(tmp_path)), 5)
    log.write({"step": 6, "train/mlm_loss": 6.5})
    log.close()
    assert read_steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsLog(supersede(Place(tmp_path)), 0).close()
    assert read_steps(tmp_path) == []


def test_an_older_attempt_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("domext_ray.training.metrics.CHECK_REST", 0.0)  # a slow first look is no reason not to look
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    supersede(Place(tmp_path))
    with pytest.raises(RunError, match="taken over"):
        log.write({"step": 1})
    assert read_steps(tmp_path) == []


def test_figures_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    log.write({"step": 1, "train/mlm_loss": math.nan, "train/grad_norm": math.inf})
    log.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_records(tmp_path)[0]["train/mlm_loss"] is None


@pytest.mark.parametrize(
    ("limits", "shown_step"), [({}, "1/9"), ({"max_seconds": 5.0}, "1"), ({"max_tokens": 50}, "1")]
)
def test_progress_shows_the_last_step_where_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limits: dict[str, Any], shown_step: str
) -> None:
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(max_steps=9, **limits)):
        log.write({"step": 1, "train/mlm_loss": 2.0, **SPEED})
    log.close()
    assert f"step {shown_step}  loss 2.000  10 tokens/s" in capsys.readouterr().err


def test_progress_shows_what_a_step_s_record_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means of the newest steps, but the newest rate; and in no more columns than a log's reader has."""
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    speed = {"time/step_seconds": 2.0, "time/seconds": 9.0, "throughput/tokens_per_second": 1234567.0}
    more = {"throughput/mfu": 0.41, "data/wait_seconds": 0.5, "train/tokens": 1, "train/grad_norm": 12345.0}
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(max_steps=1_000_000)):
        for step, wait in ((99_999, 0.1), (100_000, 0.3)):
            own = {"train/lr": step * 1e-9, "data/wait_seconds": wait}
            log.write({"step": step, "train/mlm_loss": 2.0, **speed, **more, **own})
    log.close()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("step 100,000/1,000,000  loss 2.000  1,234,567 tokens/s  500:00:00 left")
    assert line.endswith("  lr 1.0e-04  norm 1.2e+04  MFU 41%  waits 10%")
    assert len(line) < 120


def test_progress_shows_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(supersede(Place(tmp_path)), 0)
    figures = dict.fromkeys(("domain_mlm_loss", "domain_mlm_accuracy", "domain_bits_per_character"), math.nan)
    evaluation = {f"eval/{name}": value for name, value in {**figures, "general_mlm_accuracy": None}.items()}
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(max_steps=9)):
        log.write({"step": 0, **evaluation})
        log.write({"step": 1, "train/mlm_loss": math.inf, "train/grad_norm": math.nan, **SPEED, **evaluation})
    log.close()
    shown = capsys.readouterr().err
    assert "step 1/9  loss nan  10 tokens/s" in shown and "Traceback" not in shown
    for step in (0, 1):
        assert f"step {step}  held-out loss nan, accuracy nan, bits per character not measured; general" in shown


def test_of_a_run_in_a_bucket_one_thing_is_asked_at_a_time(
    objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket takes money for requests: a day of four per half second is 700,000."""
    assert metrics_module.REQUEST_SECONDS >= 10
    monkeypatch.setattr(metrics_module, "REQUEST_SECONDS", 0.25)
    proxy, run = Proxy(objects), Place(f"{BUCKET}/{tmp_path.name}/run")
    use_objects(proxy.address, monkeypatch)
    with RunProgress(run / "metrics.jsonl", TrainConfig(max_steps=9)):
        time.sleep(0.6)  # neither file is there
        (run / "metrics.jsonl").put(b"")
        notify_driver(run, "2 workers train.")
        time.sleep(0.6)
        (run / "metrics.jsonl").put((json.dumps({"step": 3, "train/mlm_loss": 2.0, **SPEED}) + "\n").encode())
        time.sleep(0.6)
        proxy.requests.clear()
        started = time.monotonic()
        time.sleep(1.5)
        number, seconds = len(proxy.requests), time.monotonic() - started
    assert 2 <= number <= seconds / 0.25 + 1 and all(line.startswith("GET /") for line in proxy.requests)
    said = capsys.readouterr().err
    assert said.count("2 workers train.") == 1 and "step 3/9" in said
    proxy.close()
