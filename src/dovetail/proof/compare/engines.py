"""Run a recorder in the environment of its engine, and open what it writes as a dump.

    python recorders/record_ENGINE.py MODEL OUT REQUEST.json       REQUEST: {"rows": [[ids], …], "steps": 4, "dtype": "float32"}

A recorder is one short file that imports its engine and safetensors, and nothing of ours. It runs every row but its last
`steps` tokens in one pass, the rest token by token through the engine's cache, and writes a dump into OUT (dump.py). The
engines are the files in that folder. The interpreter is `python`, else the environment variable DOVETAIL_ENGINE_PYTHON
(DOVETAIL_MLX_PYTHON); transformers runs in this interpreter if neither is given. None is looked up in the working directory,
which may hold anything, and the recorder runs in a directory of its own: processes that an engine starts by `python -c`
import from theirs first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dovetail.base.errors import FileError, did_you_mean, install_command, printable
from dovetail.proof.compare.dump import DUMP_FILE, Dump

FOLDER, PREFIX = Path(__file__).parent / "recorders", "record_"
VARIABLE = "DOVETAIL_{}_PYTHON"
HERE = "transformers"  # the engine that this interpreter may have
SECONDS = 1800.0  # of one recording
MESSAGE = 2000  # characters of a recorder's error that are shown
DTYPES = ("float32", "bfloat16", "float16")


def engines() -> list[str]:
    """The engines that have a recorder."""
    return sorted(file.stem.removeprefix(PREFIX) for file in FOLDER.glob(f"{PREFIX}*.py"))


def interpreter(engine: str, python: str | Path | None = None) -> Path:
    """The Python interpreter of an engine's environment, as an absolute path; a name without a slash is searched in PATH."""
    named = str(python or os.environ.get(VARIABLE.format(engine.upper())) or (sys.executable if engine == HERE else ""))
    if not named:
        raise FileError(f"{engine}: runs in an environment of its own; {_remedy(engine)}")
    path = named if os.sep in named else shutil.which(named)
    if path is None or not Path(path).is_file():
        raise FileError(f"{named}: no such interpreter; {_remedy(engine)}")
    return Path(path).absolute()  # not resolved: an environment is found by the link to its interpreter


def _remedy(engine: str) -> str:
    return f"name the interpreter of an environment with {engine}: --python PATH, or {VARIABLE.format(engine.upper())}=PATH"


def record_engine(
    engine: str,
    model: str | Path,
    out: Path,
    rows: Sequence[Sequence[int]],
    *,
    steps: int,
    dtype: str = "float32",
    python: str | Path | None = None,
) -> Dump:
    """Record a model in an engine, and write the dump to the directory `out`, which does not exist yet."""
    if engine not in engines():
        raise FileError(f"{engine}: is not an engine with a recorder; {did_you_mean(engine, engines())}".rstrip("; "))
    if dtype not in DTYPES:
        raise FileError(f"{engine}: records in {', '.join(DTYPES)}, not in {dtype}")
    if not Path(model).exists():
        raise FileError(f"{model}: no such file or directory")
    if not all(0 <= steps < len(row) for row in rows):
        raise FileError(f"{engine}: {steps} decode steps leave no token for the first pass; give longer prompts")
    program = interpreter(engine, python)
    out = Path(os.path.abspath(out))
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as place:
        written = Path(place) / "dump"
        written.mkdir()
        request = Path(place) / "request.json"
        request.write_text(json.dumps({"rows": [list(row) for row in rows], "steps": steps, "dtype": dtype}))
        file = FOLDER / f"{PREFIX}{engine}.py"
        _run(engine, [str(program), str(file), str(Path(model).absolute()), str(written), str(request)], Path(place))
        if not (written / DUMP_FILE).is_file():
            raise FileError(f"{engine}: its recorder wrote no {DUMP_FILE}")
        Dump(written)  # whole and readable, or an error
        shutil.move(written, out)
    return Dump(out)


def _run(engine: str, command: list[str], directory: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, env=environment, cwd=directory, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FileError(f"{command[0]}: {error}") from error
    missing = re.search(r"^ModuleNotFoundError: No module named '(.+)'\s*\Z", done.stderr, re.MULTILINE)
    if missing:
        remedy = f"{install_command('hf')}, or {_remedy(engine)}" if engine == HERE else _remedy(engine)
        raise FileError(f"{command[0]}: has no module {printable(missing[1])}; {remedy}")
    if done.returncode:
        tail = printable(done.stderr.strip()[-MESSAGE:], None, keep="\n")
        raise FileError(f"{engine}: its recorder failed with exit code {done.returncode}:\n{tail}")


@contextmanager
def recorded(
    engine: str, model: str, rows: Sequence[Sequence[int]], *, steps: int, dtype: str, python: str | Path | None = None
) -> Iterator[Dump]:
    """A dump that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="dovetail-dump-") as place:
        dump = record_engine(engine, model, Path(place) / "dump", rows, steps=steps, dtype=dtype, python=python)
        dump.label = f"{engine}:{model}"
        yield dump
