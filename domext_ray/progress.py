"""What a terminal shows: one line on standard error that says how far long work is, and nothing of other libraries.

On a terminal the line is rewritten in place; elsewhere, in a log, a plain line appears every ten seconds. In a notebook
the line stands beside a bar.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from domext_ray.errors import name_arguments

TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
_bar: Any = None
"""What `draw_bar` draws."""


class _Notes(io.TextIOBase):
    """A stream to a notebook in which notes and warnings name options as a function's arguments."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(name_arguments(text) if text.startswith(("note: ", "warning: ")) else text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())


@contextlib.contextmanager
def draw_bar() -> Iterator[None]:
    """In a notebook, draw how far work is as one bar, which stays only where the work fails; elsewhere do nothing.

    Notes and warnings name options as a function's arguments there, as mistakes do.
    """
    global _bar
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or "IPKernelApp" not in shell.config:
        yield
        return
    from tqdm.auto import tqdm

    bar_format = "{percentage:3.0f}%|{bar}| {desc}"
    # With a delay it is drawn when there is something to show, with these intervals whenever there is.
    _bar = tqdm(total=1.0, leave=False, delay=1e-9, mininterval=0.0, miniters=0, bar_format=bar_format)
    outputs = contextlib.redirect_stdout(_Notes(sys.stdout)), contextlib.redirect_stderr(_Notes(sys.stderr))
    try:
        with outputs[0], outputs[1]:
            yield
        _bar.n = _bar.total  # one that is not full is left standing
    finally:
        _bar.close()
        _bar = None


class StatusLine:
    """A line that says how far some work is; without `is_due` the first one is shown after the usual time."""

    def __init__(self, *, is_due: bool = True) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self._shown = -PLAIN_SECONDS if is_due else self.started

    @property
    def seconds(self) -> float:
        """Seconds since the work began, above 0."""
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another line: making one up may cost something."""
        return time.monotonic() - self._shown >= (TERMINAL_SECONDS if self.is_terminal or _bar else PLAIN_SECONDS)

    def show(self, text: str, share: float = 0.0) -> None:
        """Show a line, if it is time for one; a bar says which share of the work is done, 0 to 1."""
        if self.is_due:
            self._shown = time.monotonic()
            if _bar:
                _draw(text, share)
                return
            columns = shutil.get_terminal_size().columns  # a longer line would not be rewritten, but repeated
            self._print(text[: columns - 1] if self.is_terminal else text, "" if self.is_terminal else "\n")

    def keep(self, text: str, share: float | None = None) -> None:
        """Show a line that stays, whatever the time; without a share the bar stays where it is."""
        if bar := _bar:
            bar.clear()
            print(text, flush=True)  # on standard error a notebook has it in red
            _draw(text, bar.n if share is None else share)
        else:
            self._print(text, "\n")

    def end(self) -> None:
        """Leave the line that was shown last on the terminal."""
        if self.is_terminal:
            self._print("", "\n", "")

    def _print(self, text: str, end: str, start: str = "\r\033[K") -> None:
        with contextlib.suppress(OSError):  # a terminal that has closed is no reason for the work to end
            print(f"{start if self.is_terminal else ''}{text}", end=end, file=sys.stderr, flush=True)


def _draw(text: str, share: float) -> None:
    if bar := _bar:  # a thread may still show something when the work has ended
        bar.set_description_str(text, refresh=False)
        bar.update(share - bar.n)


def format_seconds(seconds: float) -> str:
    """Return a duration as M:SS or H:MM:SS."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep progress bars, load reports and warnings off the terminal; afterwards all is as the caller had set it.

    transformers draws a bar for every file and reports heads that an encoder does not read; DeepSpeed,
    which it imports on the way, names the accelerator. Errors still show.
    """
    from transformers.utils import logging as transformers_logging

    level, has_bars = logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()
    logging.disable(max(level, logging.WARNING))
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        logging.disable(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
