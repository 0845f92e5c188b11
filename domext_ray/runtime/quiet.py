"""Other libraries say nothing while they load or save for us: their notes are about choices that are ours."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


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
