"""The token and the rate."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from domext_ray.errors import ConfigError
from domext_ray.serving.limits import MOST_CLIENTS, RateLimit, count_retry_seconds, find_token, hash_token, is_token

TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOMEXT_SERVE_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        (f"Bearer {TOKEN}x", False),
        ("Bearer", False),
        ("", False),
        ("Bearer \xff", False),
    ],
)
def test_a_header_shows_the_token_or_not(header: str, is_right: bool) -> None:
    assert is_token(header, hash_token(TOKEN)) is is_right


def test_a_new_token_is_in_a_file_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "serve-token").write_text("of an earlier start")
    token_sha256, place = find_token("", tmp_path)
    path = Path(place)
    token = path.read_text().strip()
    assert hash_token(token) == token_sha256 and len(token) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_token("", tmp_path)[0] != token_sha256


def test_a_token_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert find_token(str(file), tmp_path) == (hash_token(TOKEN), str(file))
    monkeypatch.setenv("DOMEXT_SERVE_TOKEN", f"{TOKEN}2")
    assert find_token("", tmp_path) == (hash_token(f"{TOKEN}2"), "DOMEXT_SERVE_TOKEN of this environment")
    assert find_token(str(file), tmp_path)[0] == hash_token(TOKEN)


@pytest.mark.parametrize("token", ["", "short", "with spaces in between them", "ümläute-are-no-ascii"])
def test_a_token_that_is_none_is_refused(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(ConfigError, match="must be 16 or more printable ASCII") as error:
        find_token(str(file), tmp_path)
    assert not token or token not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_token(str(tmp_path), tmp_path)


def test_a_rate_holds_for_each_client() -> None:
    now = 0.0
    limit = RateLimit(2.0, clock=lambda: now)
    assert [limit.take("a") for _ in range(4)] == [0.0] * 4  # what two seconds bring
    assert limit.take("a") == 0.5 and limit.take("b") == 0.0
    now = 0.4
    assert limit.take("a") == pytest.approx(0.1)
    now = 0.6
    assert limit.take("a") == 0.0
    assert RateLimit(0.0).take("a") == 0.0


def test_the_client_that_was_silent_longest_is_forgotten() -> None:
    limit = RateLimit(1.0, clock=lambda: 0.0)
    assert [limit.take("a") for _ in range(3)] == [0.0, 0.0, 1.0]
    assert not any(limit.take(f"client {i}") for i in range(MOST_CLIENTS))
    assert limit.take("a") == 0.0


def test_slow_rates_take_one_request() -> None:
    limit = RateLimit(0.1, clock=lambda: 0.0)
    assert limit.take("a") == 0.0 and limit.take("a") == pytest.approx(10.0)


@pytest.mark.parametrize(("wait", "seconds"), [(0.01, "1"), (1.0, "1"), (1.2, "2")])
def test_retry_after_is_whole_seconds(wait: float, seconds: str) -> None:
    assert count_retry_seconds(wait) == seconds
