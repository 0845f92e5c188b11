"""A bucket's objects (s3://, gs://), asked with patience: what does not answer is asked again, what refuses is told.

Credentials, endpoint and region are those of the environment (AWS_*) or the node's role. gs:// takes the same path
through the same library; it has been run against a stand-in of Google's server alone. Only `storage` imports this.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.errors import StorageError, name_file

PATIENCE_SECONDS, REQUEST_SECONDS = 120.0, 60.0
"""How long a bucket is asked again that does not answer, and how long one request may take."""
KEPT_SECONDS, TIDY_SECONDS = 7 * 86_400.0, 3600.0
"""How long a copy of an object stays in this machine's cache after its last use, and how often that is looked at."""
NEW = "new"
"""The condition that nothing is there yet."""
T = TypeVar("T")


@dataclass(frozen=True)
class Info:
    """What is known of a file without reading it: bytes, a tag that changes with it, and its storage's time of it."""

    size: int
    tag: str
    modified: float


class Bucket:
    """A bucket of objects; keys are those within it."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url  # 0.1 s, for those who have a bucket

        self.url, self.is_silent, self.tidy_due = url, False, 0.0
        seconds = f"{REQUEST_SECONDS:g}s"
        endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"))
        is_plain = any(each.startswith("http://") for each in endpoints)
        self.store = from_url(
            url,
            client_options={"timeout": seconds, "connect_timeout": "5s", "allow_http": is_plain},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)},
        )

    def _ask(self, key: str, call: Callable[[], T], verb: str = "read") -> T:
        """Ask again while the bucket does not answer, with growing pauses and an end; a refusal is told at once."""
        from obstore import exceptions

        place, started, pause = f"{self.url}/{key}", time.monotonic(), 0.5
        while True:
            try:
                answer = call()
                if self.is_silent:
                    print(f"note: {self.url} answers again.", file=sys.stderr, flush=True)
                self.is_silent = False
                return answer
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place) from None
            except (exceptions.BaseError, FileNotFoundError) as error:
                is_missing, text, waited = isinstance(error, FileNotFoundError), str(error), time.monotonic() - started
                is_no_path = isinstance(error, exceptions.InvalidPathError)
            if is_no_path:
                named = re.search(r'[Pp]ath "(.*?)"', text)
                raise StorageError(
                    f"{place} cannot be {verb}: it has the object {named[1] if named else ''!r}, whose key is no path "
                    "(//, . or .., or a control character); rename or delete that, or give another place."
                )
            status = re.search(r"status code: (\d+)|status: (\d+)", text)
            number = int(status[1] or status[2]) if status else 0
            code = re.search(r"<Code>(\w+)</Code>", text)
            reason = code[1] if code else f"status {number}" if number else "no answer"
            if reason == "NoSuchBucket":
                raise StorageError(
                    f"{place} cannot be {verb}: there is no bucket {self.url}; make it, or give another."
                )
            if number == 404 or is_missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place) from None
            if "169.254.169.254" in text or "CredentialProvider" in text:
                raise StorageError(
                    f"{place} cannot be {verb}: there are no credentials; set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or give the node a role."
                )
            if 300 <= number < 500 and number not in (408, 429):
                advice = "see to the rights of the key in AWS_ACCESS_KEY_ID or of the node's role"
                advice = {"RequestTimeTooSkewed": "set this machine's clock"}.get(reason, advice)
                raise StorageError(f"{place} cannot be {verb} ({reason}): {advice}, or give another place.")
            if waited + pause > PATIENCE_SECONDS:
                raise StorageError(
                    f"{place} cannot be {verb}: {self.url} has not answered for {waited:.0f} s ({reason}); look after "
                    "that storage, and the same command goes on."
                )
            if not self.is_silent:
                self.is_silent = True
                print(
                    f"note: {self.url} does not answer ({reason}); this job asks again for {PATIENCE_SECONDS:g} s.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def info(self, key: str) -> Info | None:
        try:
            return self._describe(self._ask(key, lambda: self.store.head(key)))
        except FileNotFoundError:
            return None

    def _describe(self, found: Any) -> Info:
        return Info(found["size"], self._find_tag(found), found["last_modified"].timestamp())

    def _find_tag(self, found: Any) -> str:
        """What a condition names: of gs:// the object's generation, which its lists do not have."""
        return (self.url.startswith("gs://") and found["version"]) or found["e_tag"] or ""

    def read(self, key: str, start: int = 0) -> bytes:
        if start:
            size = (self.info(key) or Info(0, "", 0)).size
            return (
                bytes(self._ask(key, lambda: self.store.get_range(key, start=start, end=size))) if size > start else b""
            )
        return bytes(self._ask(key, lambda: self.store.get(key).bytes()))

    def read_end(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object and where they begin: in one request, where there are any."""
        found = self._ask(key, lambda: self._find_end(key, num_bytes))
        content = bytes(found.bytes())[-num_bytes:]
        return content, found.meta["size"] - len(content)

    def _find_end(self, key: str, num_bytes: int) -> Any:
        from obstore import exceptions

        try:
            return self.store.get(key, options={"range": {"suffix": num_bytes}})
        except exceptions.BaseError as error:
            # An empty object has no last bytes: S3 refuses to give them, others give it whole.
            if re.search(r"status(?: code)?: 416|non-partial", str(error)):
                return self.store.get(key)
            raise

    def put(self, key: str, source: bytes | Path, condition: str = "", *, flush: bool = True) -> str:
        known = {"version" if self.url.startswith("gs://") else "e_tag": condition}
        mode: Any = {"": "overwrite", NEW: "create"}.get(condition, known)
        settings: Any = {"use_multipart": False} if condition else {}
        try:
            found = self._ask(key, lambda: self.store.put(key, source, mode=mode, **settings), "written")
        except FileExistsError:  # or this very request came through before, and its answer was lost
            if not isinstance(source, bytes) or self.read(key) != source:
                raise
            return (self.info(key) or Info(0, "", 0)).tag
        return self._find_tag(found)

    def names(self, key: str) -> list[str]:
        found = self._ask(key, lambda: self.store.list_with_delimiter(key or None))
        # An object of the folder's own name is the empty one, KEY/, by which consoles make a folder.
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"] if each["path"] != key)]
        return sorted(each.rstrip("/").rpartition("/")[2] for each in paths)

    def is_dir(self, key: str) -> bool:
        return bool(self.names(key))

    def files(self, key: str) -> dict[str, Info]:
        """The objects below a key, but the empty ones, FOLDER/, by which consoles make folders."""
        found = self._ask(key, lambda: [each for part in self.store.list(key) for each in part])
        files = [each for each in found if each["path"] != key and (each["size"] or self.info(each["path"]))]
        return {each["path"].removeprefix(f"{key}/"): self._describe(each) for each in files}

    def delete(self, key: str) -> None:
        paths = [key, *(f"{key}/{each}" for each in self.files(key))]
        try:
            self._ask(key, lambda: self.store.delete(paths), "deleted")
        except FileNotFoundError:  # gs:// says so of what is not there, and may leave the others
            for each in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._ask(each, functools.partial(self.store.delete, each), "deleted")

    def local(self, key: str, name: str) -> Path:
        """Download a file, or a folder with all in it, unless that state of it is here already."""
        own = self.info(key)
        found = {"": own} if own else self.files(key)
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{key}")
        tags = {each: info.tag or [info.size, info.modified] for each, info in sorted(found.items())}
        state = hashlib.sha256(json.dumps([self.url, key, tags]).encode()).hexdigest()
        folder = find_cache() / "objects" / state[:32]
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # pages quote private text
            temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
            for each, info in found.items():
                target = temporary / name / each if each else temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._ask(key, functools.partial(self._download, f"{key}/{each}" if each else key, target))
                if target.stat().st_size != info.size:
                    raise StorageError(f"{self.url}/{key} was replaced while it was read; run the same command again.")
            with contextlib.suppress(OSError):  # another process had it first
                os.rename(temporary, folder)
            shutil.rmtree(temporary, ignore_errors=True)
            if time.monotonic() > self.tidy_due:  # a corpus has thousands of files, and each is a copy
                self.tidy_due = time.monotonic() + TIDY_SECONDS
                _remove_unused(folder.parent)
        os.utime(folder)
        return folder / name

    def _download(self, key: str, target: Path) -> None:
        with name_file(target), target.open("wb") as file:
            for chunk in self.store.get(key).stream(min_chunk_size=2**23):
                file.write(chunk)


def _remove_unused(folder: Path) -> None:
    for each in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - each.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(each, ignore_errors=True)


def find_cache() -> Path:
    """Return the folder of this machine that holds nothing but what can be fetched or made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "domext_ray"
