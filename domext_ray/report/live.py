"""The page of a run that trains: written after evaluations, and when the run stops, whatever stopped it.

Enters: a run directory that its workers write to. Leaves: report.html, curves.png, and the index of all runs. All of it
happens in the driver, in at most a fiftieth of the time, and no fault of a page ends a run.
"""

from __future__ import annotations

import sys
import threading
import time

from domext_ray.report.index import write_index
from domext_ray.report.report import State, write_report
from domext_ray.storage import Place, Where
from domext_ray.training.metrics import find_last_step

REST = 50.0
"""Times the seconds that a page took: so long is the next one waited for."""


class LiveReport:
    """Writes a run's page while it trains.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Where) -> None:
        self.run_dir = Place(run_dir)
        self._due, self._lock, self._has_ended = 0.0, threading.Lock(), False

    def note_evaluation(self) -> None:
        """Write the page, unless the last one was a moment ago."""
        if time.monotonic() >= self._due:
            self._write("running")

    def note_stop(self) -> None:
        """Write the page of a run that is ending before its limit."""
        if find_last_step(self.run_dir / "metrics.jsonl", default=-1) >= 0:  # else there is no figure yet
            self._write("stopped")
        self.close()

    def close(self) -> None:
        """Wait for a page that is being written; the thread that waits for evaluations writes no other one."""
        with self._lock:
            self._has_ended = True

    def _write(self, state: State) -> None:
        with self._lock:
            if not self._has_ended:
                self._write_now(state)

    def _write_now(self, state: State) -> None:
        started = time.monotonic()
        try:
            write_report(self.run_dir, state)
            write_index(self.run_dir.parent)
        except Exception as error:  # a full disk, a damaged file, a figure that cannot be drawn: the run is worth more
            print(f"warning: the report could not be written ({error})", file=sys.stderr, flush=True)
        ended = time.monotonic()
        self._due = ended + REST * (ended - started)
