"""A user's mistake that a Ray task meets reaches the driver as its own sentence, not as a remote traceback."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from domext_ray.errors import CorpusError, find_user_error
from domext_ray.runtime.stopping import exit_on_user_error

SENTENCE = "text.txt cannot be read; mend it or leave it out."


def test_an_error_of_a_task_is_the_sentence_that_it_raised(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise CorpusError(SENTENCE)

    def wait_for_another() -> Any:
        return ray.get(ray.remote(num_cpus=0)(fail).remote())

    for work in (fail, wait_for_another):
        with pytest.raises(CorpusError) as caught:
            ray.get(ray.remote(num_cpus=0)(work).remote())
        assert "\n" in str(caught.value)  # what Ray raises is a CorpusError, too, with a traceback as its text
        found = find_user_error(caught.value)
        assert type(found) is CorpusError and str(found) == SENTENCE
        with pytest.raises(SystemExit) as ended, exit_on_user_error():
            raise caught.value
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"error: {SENTENCE}\n")


def test_a_defect_met_while_a_mistake_is_told_keeps_its_traceback() -> None:
    try:
        try:
            raise CorpusError(SENTENCE)
        except CorpusError:
            {}["a defect"]
    except KeyError as error:
        assert find_user_error(error) is None
    try:
        try:
            raise CorpusError(SENTENCE)
        except CorpusError as mistake:
            raise RuntimeError("what a library makes of it") from mistake
    except RuntimeError as error:
        assert str(find_user_error(error)) == SENTENCE
