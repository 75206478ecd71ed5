"""Every error a user can cause: what is wrong, where, and what to do. Each family has its own exit code."""

from __future__ import annotations


class DovetailError(Exception):
    """The root of all errors raised on purpose."""

    exit_code = 1


class SpecError(DovetailError):
    """A spec that cannot be built: `path` is where in the tree, `remedy` what to do about it."""

    exit_code = 3

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        where = f"{path}: " if path else ""
        super().__init__(f"{where}{problem}" + (f" ({remedy})" if remedy else ""))


class StateError(DovetailError):
    """Decode memory asked for something it cannot do: a full pool, a row out of range."""


class BackendError(DovetailError):
    """No kernel offers what the spec needs."""


class FileError(DovetailError):
    """A file that is missing, damaged or not what it claims to be."""

    exit_code = 4


class Diverged(DovetailError):
    """A training run whose loss stopped being a number."""

    exit_code = 5
