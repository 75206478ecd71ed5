"""The errors Dovetail raises on purpose: each message says where, what is wrong and what to do. `exit_code` is the code with
which the command line ends."""

from __future__ import annotations

DISTRIBUTION = "dovetail-lm"  # the name on the index; `dovetail` there is another project


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of these extras."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'


class DovetailError(Exception):
    """The base of every error below, whose exit code is 4 unless it says another; 1 is left to a law that fails and to two
    functions that differ."""

    exit_code = 4


class UsageError(DovetailError):
    """A command line or a call that cannot be understood: a flag that does not exist, a value outside its limits."""

    exit_code = 2


class SpecError(DovetailError):
    """A spec that cannot be built: `path` is the field, `problem` what is wrong with it, `remedy` what to do."""

    exit_code = 3

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        where = f"{path}: " if path else ""
        super().__init__(f"{where}{problem}" + (f" ({remedy})" if remedy else ""))


class InputError(DovetailError, ValueError):
    """Inputs that do not fit the model or their layout: a layout of another shape, a token id outside the vocabulary."""


class KeywordError(DovetailError, TypeError):
    """A call with a keyword that the function does not have."""

    exit_code = 2


class StateError(DovetailError):
    """A request that the decode state cannot serve: a full pool, a row out of range."""


class BackendError(DovetailError):
    """No attention kernel offers what the spec needs."""


class FileError(DovetailError):
    """A file that is missing, damaged or not what it claims to be."""


class ResourceError(DovetailError):
    """A computation that needs more memory than there is."""


class NonFiniteError(DovetailError):
    """A tensor holds NaN or infinity where a result needs finite numbers."""


class Diverged(DovetailError):
    """A training run whose loss or weights are not finite."""

    exit_code = 5
