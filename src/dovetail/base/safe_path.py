"""`python -m dovetail` imports from the working directory first, which may hold anything: take it off the path."""

from __future__ import annotations

import os
import sys


def leave_working_directory() -> None:
    """Remove the working directory from the front of sys.path, unless this package is in it."""
    here = os.getcwd()
    if sys.path[:1] == [here] and not os.path.isdir(os.path.join(here, "dovetail", "base")):
        del sys.path[0]
