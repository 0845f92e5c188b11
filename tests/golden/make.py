"""Makes golden files anew.

    python tests/golden/make.py [NAME ...]

NAME is rows, batches, losses, exports, encoded, tasks, measures or mistakes; without one, all are made. A golden file
is made anew only in a commit that touches nothing else and names the cause.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MAKING = "DOMEXT_MAKE_GOLDEN"
"""The variable of the environment with which the tests write what they else compare."""

if __name__ == "__main__":
    import pytest

    os.environ[MAKING] = "1"
    wanted = f"({' or '.join(f'test_{name}' for name in sys.argv[1:]) or 'not ray_train'}) and not quick"
    sys.exit(pytest.main([str(Path(__file__).parent), "-n", "0", "-q", "--durations=10", "-m", "", "-k", wanted]))
