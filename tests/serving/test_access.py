"""The token that requests show, and the address that a user is shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from domext_ray.errors import ConfigError
from domext_ray.serving.guard import find_token, hash_token, is_token
from domext_ray.serving.serve import show_address

TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOMEXT_SERVE_TOKEN", raising=False)


def test_a_header_shows_the_token_or_not() -> None:
    for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert is_token(header, hash_token(TOKEN)), header
    for header in (f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer", "", "Bearer \xff"):
        assert not is_token(header, hash_token(TOKEN)), header


def test_a_new_token_is_in_a_file_of_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "private" / "serve-token"
    file.parent.mkdir()
    file.write_text("of an earlier start")
    token, place = find_token("", file)
    assert place == str(file) and file.read_text().strip() == token and len(token) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert find_token("", file)[0] != token


def test_a_token_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert find_token(str(file), tmp_path) == (TOKEN, str(file))
    monkeypatch.setenv("DOMEXT_SERVE_TOKEN", f"{TOKEN}2")
    assert find_token("", tmp_path) == (f"{TOKEN}2", "DOMEXT_SERVE_TOKEN of this environment")
    assert find_token(str(file), tmp_path)[0] == TOKEN


def test_a_token_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for token in ("", "short", "with spaces in between them", "ümläute-are-no-ascii"):
        file.write_text(token)
        with pytest.raises(ConfigError, match="must be 16 or more printable ASCII") as error:
            find_token(str(file), tmp_path)
        assert not token or token not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_token(str(tmp_path), tmp_path)


def test_an_address_is_one_that_this_machine_can_open() -> None:
    for host, shown in (
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("10.0.0.7", "10.0.0.7"),
        ("localhost", "localhost"),
    ):
        assert show_address(host, 8000) == f"http://{shown}:8000/"
        assert show_address(host, 8000, "a+b#c%20&d") == f"http://{shown}:8000/#token=a%2Bb%23c%2520%26d"
