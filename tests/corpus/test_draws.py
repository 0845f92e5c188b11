"""Purposes of draws: no two are equal, and each is one file's own."""

from __future__ import annotations

import re

from conftest import REPOSITORY

from domext_ray.text.data.draws import Purpose


def test_no_two_draws_share_their_counters() -> None:
    numbers = [purpose.value for purpose in Purpose.__members__.values()]
    assert len(set(numbers)) == len(numbers)
    users: dict[str, list[str]] = {name: [] for name in Purpose.__members__}
    unnamed = []
    for path in sorted((REPOSITORY / "domext_ray").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"\bPurpose\.(\w+)", text)):
            users[name].append(path.name)
        if "import hash_counters" in text:
            unnamed.append(path.name)
    assert {name: len(files) for name, files in users.items()} == dict.fromkeys(users, 1), users
    assert unnamed == ["evaluate.py"], "its seed is its own"
