"""The table of mutations is whole: each breaks one place that is there, and names a test that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import REPOSITORY, Mutation, read_mutations


@pytest.mark.parametrize("mutation", read_mutations(), ids=lambda each: each.about)
def test_a_mutation_has_its_place_and_its_test(mutation: Mutation) -> None:
    assert (REPOSITORY / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    path, _, name = mutation.test.partition("::")
    place = Path(REPOSITORY / path)
    assert place.exists() and (not name or f"def {name}(" in place.read_text(encoding="utf-8"))
