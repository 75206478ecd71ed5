"""The available memory, and a check before a computation that needs more."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from dovetail.base.errors import ResourceError
from dovetail.base.memory import available_memory, check_memory

LIMITED = """
import resource
from dovetail.base.memory import available_memory
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
print(available_memory())
"""


def test_a_need_beyond_the_machine_is_refused_with_both_figures() -> None:
    available = available_memory()
    assert available is not None
    assert available > 2**20
    check_memory(2**10, "a small model")
    with pytest.raises(ResourceError, match=r"a model of 10¹² parameters needs about .* GB of memory; .* available; choose"):
        check_memory(4 * 10**12, "a model of 10¹² parameters")


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY, reason="already limited")
def test_the_limit_of_the_process_counts() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=60)
    assert 0 < int(done.stdout) < 2**29
