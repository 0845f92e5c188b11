"""The table of mutations is whole: each breaks one place that is there, and names a test that is there."""

from __future__ import annotations

from pathlib import Path

from mutations import REPOSITORY, read_mutations


def test_a_mutation_has_its_place_and_its_test() -> None:
    for mutation in read_mutations():
        assert (REPOSITORY / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation
        path, _, name = mutation.test.partition("::")
        place = Path(REPOSITORY / path)
        assert place.exists() and (not name or f"def {name}(" in place.read_text(encoding="utf-8")), mutation
