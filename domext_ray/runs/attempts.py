"""Who works in a place: each start is an attempt with a number of its own, and what an older one publishes is refused.

RUN/attempts/000003.json is made on the condition that there is none, which on a disk and in a bucket one job alone can
do, and made anew while the job lives. A job that was frozen, or cut off, and comes back finds a later number there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domext_ray.config.options.submitted import find_submission
from domext_ray.errors import DomextError, RunError, StorageError
from domext_ray.files import Kind, check_values
from domext_ray.progress import StatusLine
from domext_ray.storage import NEW, Place, hash_text, parse_json

BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
"""How often a job shows that it lives; an attempt that has not for so long may be taken over."""
LEFTOVER_SECONDS = 7 * 86_400.0
"""How long work that nobody came back for is kept."""
ATTEMPTS, RUN = "attempts", "run.json"
_FINISHED = "manifest.json"
_OWNER: dict[str, Kind] = {"who": str, "machine": str, "pid": int, "started": str}
_NAME = re.compile(r"(\d{6}|[1-9]\d{6,17})\.(json|end)")
_WORK = re.compile(r"(words-)?[0-9a-f]{16}")


@dataclass
class Attempt:
    """One start of a run, known by its number: RUN/attempts/000003.json, which its job makes anew while it lives.

    A job's workers have copies of it, so that what they publish is refused once the job's own number goes up. Threads
    of the job that publish, the one that shows that it lives among them, never see a number that is going up.
    """

    run: Place
    number: int
    owner: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # who has it, as its file says
    _turn: Any = field(default_factory=threading.RLock, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return Attempt, (self.run, self.number, self.owner)  # another process has a lock of its own

    @property
    def place(self) -> Place:
        return self.run / ATTEMPTS / f"{self.number:06d}.json"

    @property
    def _request(self) -> Place:
        return self.run / ATTEMPTS / f"{self.number:06d}.end"

    def check(self) -> bool:
        """Return whether the attempt is asked to save and end; a RunError where a later one has the run."""
        found = _list_attempts(self.run)
        with self._turn:  # the number may be going up, which was seen in the list already
            if any(number > self.number for number, ending in found if ending == "json"):
                raise self._refuse()
            return (self.number, "end") in found

    def _refuse(self) -> RunError:
        return RunError(f"another job has taken over the run in {self.run}; this one stops without writing.")

    def begin(self, after: int) -> None:
        """Take the number after another one, and remove what earlier attempts have left.

        A FileExistsError says that another job has it, a RunError that others have come and gone since.
        """
        with self._turn:
            Attempt(self.run, after + 1).place.put(json.dumps(self.owner).encode(), NEW)
            self.number = after + 1  # from now on, whatever fails below
            self.check()
            for number, ending in _list_attempts(self.run):
                if number < self.number:
                    (self.run / ATTEMPTS / f"{number:06d}.{ending}").delete()

    def show_life(self) -> None:
        """Make the attempt's file anew; a RunError where a later attempt has the run."""
        with self._turn:
            Place(self.place, self).put(json.dumps(self.owner).encode())

    def ask_to_end(self) -> None:
        """Ask the attempt's workers to save and end."""
        self._request.put(b"")

    def confirm_end(self) -> None:
        """Tell who asked the workers to end that they have saved and publish nothing more."""
        self._request.delete()

    def is_end_confirmed(self) -> bool:
        """Whether the workers have done what `ask_to_end` asks for."""
        return not self._request.is_file()

    def shut_out_workers(self) -> None:
        """Take the run over from the attempt's own workers: what they publish from now on is refused."""
        with self._turn:
            self.check()
            try:
                self.begin(self.number)
            except FileExistsError:
                raise self._refuse() from None


def supersede(run: Place) -> Place:
    """Begin a run's next attempt, whoever may be at work there: what that publishes from now on is refused."""
    attempt = Attempt(run, 0, {**_describe_process(), "ended": True})
    attempt.begin(_find_newest(run))
    return Place(run, attempt)


@contextlib.contextmanager
def hold(run: Place, *, purpose: str = "") -> Iterator[Place]:
    """Hold a run against other jobs; the place that is returned refuses to publish once another job has taken it over.

    A job that has ended lets go, one that was killed on this machine, too. One of another machine is given
    `STALE_SECONDS` to show that it lives; ages are told by the storage's clock alone. `purpose` says what another job
    does there, which is then waited for; without one that job is a RunError.
    """
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    attempt = Attempt(run, 0, {**_describe_process(), "since": since})
    _take(attempt, purpose)
    has_ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(attempt, has_ended), name="heartbeat", daemon=True)
    beat.start()
    try:
        yield Place(run, attempt)
    finally:
        is_failing = sys.exception() is not None
        has_ended.set()
        beat.join()
        try:
            if attempt.place.is_file():
                Place(attempt.place, attempt).put(json.dumps({**attempt.owner, "ended": True}).encode())
        except RunError:  # the run is another's
            pass
        except (StorageError, OSError) as error:  # what has failed already says so itself
            if not is_failing:
                print(f"warning: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def lock_folder(place: Place, what: str, option: str, *, purpose: str = "") -> Iterator[Place]:
    """Make a folder and hold it, as `hold` does.

    A new one goes again with nothing in it, and after a mistake that shows before it has an identity (an empty corpus,
    say). A job that is stopped leaves what it has made, a learned vocabulary for example; so does one that finds its
    disk full. With a `purpose` (see `hold`) it is a folder of work, which belongs to its job alone, new or not.
    """
    held: Place | None = None
    above = [folder for folder in Path(place).parents if not os.path.exists(folder)] if place.is_local else []
    is_own = bool(purpose) or not place.exists()
    if place.is_local:
        try:
            Path(place.parent).mkdir(parents=True, exist_ok=True)
            Path(place).mkdir(0o700 if purpose else 0o777, exist_ok=True)  # work holds held-out text
        except OSError as error:
            raise RunError(f"{what} {place} cannot be made ({error.strerror}); give another {option}.") from error
    try:
        with hold(place, purpose=purpose) as held:
            yield held
    except StorageError:  # what cannot be asked, or written to, is left as it is
        raise
    except BaseException as error:
        is_mistake = isinstance(error, DomextError) and not isinstance(error, RunError)
        is_nothing = is_mistake or {*place.list_names()} <= {ATTEMPTS}
        if held is not None and is_own and is_nothing and not (place / RUN).is_file():
            place.delete()
            for folder in above:
                with contextlib.suppress(OSError):  # others may have put something there
                    os.rmdir(folder)
        raise


@contextlib.contextmanager
def lock_work(folder: Place, purpose: str) -> Iterator[Place]:
    """Hold a folder of work that the same command goes on with; another job with the same work is waited for.

    It stays for a second start. What nobody has come back for within a week is removed by the next job beside it. The
    folder's name is a hash of all that decides the work, and may begin with `words-`.
    """
    with lock_folder(folder, "the folder", "--prepare.cache_dir", purpose=purpose) as work:
        _remove_leftovers(work)
        yield work


def _remove_leftovers(own: Place) -> None:
    """Remove what jobs left beside some work a week ago or more; what has its manifest is finished and stays."""
    now = _tell_time(own)
    for name in own.parent.list_names():
        folder = own.parent / name
        if not _WORK.fullmatch(name) or folder == own or (folder / _FINISHED).is_file():
            continue
        newest = Attempt(folder, _find_newest(folder)).place.info()
        if newest is None or now - newest.modified < LEFTOVER_SECONDS:
            continue
        with contextlib.suppress(RunError, StorageError, OSError):  # a job works there, or it is another user's
            with hold(folder) as held:
                held.delete()
            print(f"removed {folder}, which a job left a week ago or more", file=sys.stderr)


def _beat(attempt: Attempt, has_ended: threading.Event) -> None:
    """Show that a job lives until it has ended, or has lost its run, which it is told in any case."""
    pause = BEAT_SECONDS
    while not has_ended.wait(pause):
        started = time.monotonic()
        try:
            attempt.show_life()
        except RunError as error:  # what the job publishes is refused, too; it may be long until then
            print(f"warning: {error}", file=sys.stderr, flush=True)
            return
        except Exception as error:  # whatever it is, the job goes on, and is another's once nothing shows that it does
            print(f"warning: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
        pause = max(0.0, BEAT_SECONDS - (time.monotonic() - started))  # storage may take most of the time


def _take(attempt: Attempt, purpose: str) -> None:
    """Begin the attempt after the newest one, once the job of that has let go."""
    run = attempt.run
    seen: dict[int, float] = {}
    line = StatusLine()
    while True:
        newest = _find_newest(run)
        holder = _find_holder(Attempt(run, newest).place) if newest else None
        if holder is None:
            with contextlib.suppress(FileExistsError):  # another job was faster
                return attempt.begin(newest)
            continue
        is_known, modified = newest in seen, holder["modified"]
        lives = holder["is_here"] or "who" not in holder or seen.setdefault(newest, modified) != modified
        who = holder.get("who", "a job")
        if lives and not purpose:
            raise RunError(
                f"another job is working in {run}: {who} has held it since {holder.get('since')}, and showed "
                f"{holder['age']:.0f} s ago that it lives; wait for it, stop it, or give another --run.name."
            )
        if lives:
            line.show(f"waiting for {who}, which is {purpose}; {run} will have it, {line.seconds:.0f} s")
        elif not is_known:
            print(
                f"note: {run} was held by {who}; this job waits up to {STALE_SECONDS:g} s to see whether "
                "that job still lives.",
                flush=True,
            )
        time.sleep(BEAT_SECONDS / 10)


def _list_attempts(run: Place) -> list[tuple[int, str]]:
    """The files of a run's attempts: the number of each, and its ending."""
    found = filter(None, map(_NAME.fullmatch, (run / ATTEMPTS).list_names()))
    return [(int(match[1]), match[2]) for match in found]


def _find_newest(run: Place) -> int:
    """The number of a run's newest attempt; 0: there is none."""
    return max((number for number, ending in _list_attempts(run) if ending == "json"), default=0)


def _find_holder(newest: Place) -> dict[str, Any] | None:
    """Who is at work, as far as an attempt tells; None: it has ended, or its job is dead."""
    holder: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError, RunError):  # it has gone since, or a disk has lost it
        found = parse_json(newest.read_bytes())
        check_values(newest, found, "JSON object", "", _OWNER)
        holder = found
    info, is_here = newest.info(), holder.get("machine") == _describe_process()["machine"]
    if info is None or holder.get("ended") or (is_here and _find_start(holder["pid"]) != holder["started"]):
        return None
    age = max(0.0, _tell_time(newest.parent) - info.modified)
    return None if age > STALE_SECONDS else {**holder, "is_here": is_here, "modified": info.modified, "age": age}


def _tell_time(folder: Place) -> float:
    """What time it is by the storage's own clock: that of a file which is put now."""
    probe = folder / f".now-{uuid.uuid4().hex[:8]}"
    probe.put(b"", flush=False)
    info = probe.info()
    probe.delete()
    return info.modified if info else time.time()


def _describe_process() -> dict[str, Any]:
    """Who this process is; `machine` tells whether its number means the same process where it is read."""
    machine = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            machine.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
    job = find_submission() or os.environ.get("SLURM_JOB_ID")
    who = f"process {os.getpid()} on {socket.gethostname()}{f' (job {job})' if job else ''}"
    mark = hash_text(" ".join(machine))[:16]
    return {"who": who, "machine": mark, "pid": os.getpid(), "started": _find_start(os.getpid())}


def _find_start(pid: int) -> str:
    """When a process of this machine was started, in the system's ticks; empty: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
