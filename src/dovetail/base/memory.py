"""The memory that this process may still use, and a check before a long computation that it is enough."""

from __future__ import annotations

import resource
from pathlib import Path

from dovetail.base.errors import ResourceError

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # a limit of the system beyond this is none


def available_memory() -> int | None:
    """Return the bytes that can still be allocated: of the machine, of the control group and of this process; None: unknown."""
    limits = [limit for limit in (_machine(), _control_group(), _process()) if limit is not None]
    return max(0, min(limits)) if limits else None


def check_memory(needed: int, what: str) -> None:
    """Raise ResourceError where `what` needs more bytes than are available."""
    available = available_memory()
    if available is not None and needed > available:
        problem = f"{what} needs about {_shown(needed)} of memory; {_shown(available)} are available"
        raise ResourceError(f"{problem}; choose a smaller model, batch or length")


def _shown(count: int) -> str:
    return f"{count / 2**30:,.1f} GB" if count >= 2**30 / 10 else f"{count / 2**20:,.0f} MB"


def _machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group() -> int | None:
    """The limit of a container less what it uses; memory that only caches files counts as free."""
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None or limit > UNLIMITED:
        return None
    cached = sum(int(line.split()[1]) for line in _lines(CGROUP / "memory.stat") if line.startswith(("inactive_file ",)))
    return limit - used + cached


def _process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _lines(Path("/proc/self/statm"))
    if limit in (-1, resource.RLIM_INFINITY) or limit > UNLIMITED or not pages:
        return None
    return limit - int(pages[0].split()[0]) * resource.getpagesize()


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):  # another operating system, or no permission
        return []
