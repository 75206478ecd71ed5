"""The attack on the command line, repeated: more than 2,500 odd inputs over all verbs, and 300 kills in the middle of a save.

    python benchmarks/hostile.py [--json] [--quick] [--inputs N] [--kills N] [--list FILE]

Each input runs in a child that is forked with the package loaded. A child fails by a traceback (also an internal error, a panic
or a crash), by more than 10 seconds or 1 GB beyond the memory it was forked with, by a control character in its output, by exit
code 0 where the input cannot be right, by running code of a file, or by overwriting a file without --force. Time that a child
waits for a processor does not count.

A kill is SIGKILL at a random moment of a verb that replaces a directory. Afterwards the directory must be the old one or the
new one, whole, or, of a verb that continues where it was killed (RESUMED), one that says that it is unfinished; the verb must
then succeed, and leave nothing else behind.
"""

from __future__ import annotations

import dataclasses as dc
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hostile_files import file_inputs, more_fixtures
from hostile_inputs import BASE, CANARY, PRECIOUS, Input, every_input, fixtures
from measure import Goal, Row, arguments, progress, report

from dovetail.base.errors import FileError
from dovetail.cli import main as dovetail
from dovetail.cli.failure import INTERNAL

SECONDS, BYTES = 10.0, 2**30  # limits of a run; beyond what the child was forked with
HARD = 3 * 2**30  # bytes of address space that a child may add: protects the machine
PATIENCE = 6.0  # a child is killed when it has lived for this many times SECONDS, however long it waited for a processor
FAULTS = ("tracebacks", "over 10 s", "over 1 GB", "escapes", "exit 0 on failure", "code run", "overwritten")
CONTROLS, HARMLESS = ("Cc", "Cf", "Cs", "Zl", "Zp"), "\n\t\ufffd\u200c\u200d"
CRASHES = ("Traceback (most recent call last)", "panicked at", "internal error")
RESUMED = ("train", "tune", "data build")  # --force replaces at the start what is there
SAVES = {
    "import": ("import", "hf", "-o", "out", "--force"),
    "export": ("export", "model", "-o", "out-hf", "--force"),
    "graft": (*BASE["graft"], "-o", "out", "--force"),
    "train": (*BASE["train"], "-o", "out", "--force"),
    "tune": (*BASE["tune"], "-o", "out", "--force"),
    "quantize": (*BASE["quantize"], "-o", "out", "--force"),
    "merge": (*BASE["merge"], "-o", "out", "--force"),
    "data build": ("data build", "text.txt", "-o", "out", "--lines", "--workers=1", "--force"),
}


@dc.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int  # negative: the signal
    seconds: float
    bytes: int
    output: str
    canary: bool
    overwritten: bool = False


def run(item: Input, folder: Path, *, kill_after: float | None = None) -> Outcome:
    """Run one input in a forked child, in a folder of its own."""
    folder = folder.resolve()  # the child changes its working directory
    item.prepare(folder)
    output = folder / ".output"
    before = resident()
    child = os.fork()
    if child == 0:
        _become(item.args, folder, output, item.stdin)
    seconds, usage, status = _watched(child, kill_after)
    code = os.waitstatus_to_exitcode(status)
    text = output.read_bytes()[:4_000_000].decode("utf-8", "replace")
    canary = any(name == CANARY for _, _, names in os.walk(folder) for name in names)
    precious = folder / PRECIOUS
    overwritten = "--force" not in item.args and precious.is_file() and precious.read_text() != "precious"
    return Outcome(code, seconds, max(0, usage.ru_maxrss * 1024 - before), text, canary, overwritten)


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _become(args: tuple[str, ...], folder: Path, output: Path, stdin: bytes = b"") -> None:
    """In the child: run the verb with its output in a file, and exit as it does."""
    os.setsid()
    os.chdir(folder)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    (folder / ".stdin").write_bytes(stdin)
    for source, target in ((os.open(folder / ".stdin", os.O_RDONLY), 0), (handle, 1), (handle, 2)):
        os.dup2(source, target)
    sys.stdin = os.fdopen(os.dup(0), encoding="utf-8", errors="strict")
    sys.stdout, sys.stderr = (os.fdopen(os.dup(handle), "w", buffering=1) for _ in range(2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HARD, size + HARD))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    code = INTERNAL
    try:
        dovetail(list(args))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def _watched(child: int, kill_after: float | None) -> tuple[float, resource.struct_rusage, int]:
    """Wait for a child; return the seconds it ran or slept, not those in which it waited for a processor."""
    begin, delayed = time.monotonic(), 0.0
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        lived = time.monotonic() - begin
        if pid:
            _end_group(child)
            return lived - delayed, usage, status
        with suppress(OSError, IndexError):  # it has just ended
            delayed = int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
        late = lived - delayed > 1.2 * SECONDS or lived > PATIENCE * SECONDS
        if late or (kill_after is not None and lived >= kill_after):
            _end_group(child)
        time.sleep(0.002)


def _end_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def faults(item: Input, outcome: Outcome) -> list[str]:
    """Return what is wrong with a run."""
    controls = {c for c in outcome.output if unicodedata.category(c) in CONTROLS} - set(HARMLESS)
    crashed = outcome.code == INTERNAL or (outcome.code < 0 and outcome.seconds < SECONDS)
    wrong = {
        "tracebacks": crashed or any(sign in outcome.output for sign in CRASHES),
        "over 10 s": outcome.seconds > SECONDS,
        "over 1 GB": outcome.bytes > BYTES or "not enough memory" in outcome.output,
        "escapes": bool(controls),
        "exit 0 on failure": item.must_fail and outcome.code == 0,
        "code run": outcome.canary,
        "overwritten": outcome.overwritten,
    }
    return [name for name in FAULTS if wrong[name]]


# -- kills ------------------------------------------------------------------------------------------------------------


def kills(count: int, rng: random.Random, source: Path, place: Path, tick: Callable[[], None]) -> Iterator[str]:
    """Kill saves at random moments; yield a line for each directory that is half written or blocks the next save."""
    lengths: dict[str, float] = {}
    for i in range(count):
        verb = list(SAVES)[i % len(SAVES)]
        folder = place / f"kill-{i}"
        shutil.copytree(source, folder, symlinks=True)
        target = folder / SAVES[verb][SAVES[verb].index("-o") + 1]
        whole = run(Input(verb, SAVES[verb]), folder)
        if whole.code:
            yield f"{verb}: the first save fails: {whole.output[-300:]}"
        lengths[verb] = max(lengths.get(verb, 0.0), whole.seconds)
        run(Input(verb, SAVES[verb]), folder, kill_after=rng.uniform(0, 1.2 * lengths[verb]))
        if problem := _unreadable(verb, target):
            yield f"{verb} {i}: half written: {problem}"
        again = run(Input(verb, SAVES[verb]), folder)
        left = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name not in (".output", ".stdin")]
        if again.code or left:
            yield f"{verb} {i}: blocks: exit {again.code}, left {left}: {again.output[-300:]}"
        shutil.rmtree(folder)
        tick()


def _unreadable(verb: str, target: Path) -> str:
    """Return why a directory cannot be loaded; an empty string where it can."""
    from dovetail.data.manifest import Manifest
    from dovetail.hf.load import load

    try:
        Manifest.load(target) if verb == "data build" else load(target)
    except Exception as error:
        unfinished = isinstance(error, FileError) and "is an unfinished" in str(error) and verb in RESUMED
        return "" if unfinished else f"{type(error).__name__}: {error}"
    return ""


# -- a server that answers oddly --------------------------------------------------------------------------------------

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
TOKEN = {"tokens": ["token_id:7"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:7": -1.0}]}
GOOD = json.dumps({"choices": [{"logprobs": TOKEN}]})
ANSWERS: dict[str, bytes] = {
    "empty": b"",
    "no-http": b"hello\r\n\r\n",
    "status": b"HTTP/1.1 99999 X\r\n\r\n",
    "words": b"HTTP/1.1 abc\r\n\r\n",
    "500": b"HTTP/1.1 500 Oh\r\n\r\n\x1b[2Kdovetail: all is well",
    "404": b"HTTP/1.1 404 \x1b[2K\r\n\r\n",
    "400": b"HTTP/1.1 400 No\r\n\r\n\x1b]0;own\x07",
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1/x\r\n\r\n",
    "redirect-file": b"HTTP/1.1 301 Moved\r\nLocation: file:///etc/passwd\r\n\r\n",
    "redirect-loop": b"HTTP/1.1 307 Loop\r\nLocation: /redirect-loop/completions\r\n\r\n",
    "no-json": JSON + b"<html>",
    "list": JSON + b"[]",
    "deep": JSON + b"[" * 100_000,
    "nan": JSON + GOOD.replace("-1.0", "NaN").encode(),
    "inf": JSON + GOOD.replace("-1.0", "-Infinity").encode(),
    "null": JSON + GOOD.replace("-1.0", "null").encode(),
    "string": JSON + GOOD.replace("-1.0", '"x"').encode(),
    "huge-number": JSON + GOOD.replace("-1.0", "1" * 5000).encode(),
    "huge-id": JSON + GOOD.replace("token_id:7", "token_id:999999999999999999999").encode(),
    "evil": JSON + GOOD.replace("token_id:7", "\\u001b[2Kdovetail: all is well").encode(),
    "no-choices": JSON + b"{}",
    "empty-choices": JSON + b'{"choices": []}',
    "choices": JSON + b'{"choices": [1]}',
    "logprobs": JSON + b'{"choices": [{"logprobs": []}]}',
    "content": JSON + b'{"choices": [{"logprobs": {"content": [{}]}}]}',
    "latin": JSON + b"\xff\xfe",
    "large": JSON + b" " * (3 * 2**20),
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    "negative-length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    "huge-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nx",
    "headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    "long-header": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
}
STALLS = ("drip", "silent", "drip-header")


@contextmanager
def server() -> Iterator[int]:
    """A server in a process of its own; the first name of the path chooses the answer. Gives the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()


def _answer(connection: socket.socket) -> None:
    with connection:
        try:
            asked = connection.recv(65536).split(b" ")
            name = asked[1].split(b"/")[1].decode() if len(asked) > 1 else ""
            if name in STALLS:
                connection.sendall(b"HTTP/1.1 200 OK\r\n" if name == "drip-header" else JSON)
                for _ in range(600):
                    if name != "silent":
                        connection.sendall(b" " if name == "drip" else b"A: b\r\n")
                    time.sleep(0.1)
            connection.sendall(ANSWERS.get(name, b""))
        except OSError:
            return


# -- the report -------------------------------------------------------------------------------------------------------


Result = tuple[Input, Outcome, list[str]]


def attack(inputs: list[Input], source: Path, place: Path, tick: Callable[[], None]) -> Iterator[Result]:
    """Run the inputs one after the other, each in a copy of the fixtures."""
    for i, item in enumerate(inputs):
        folder = place / f"input-{i}"
        shutil.copytree(source, folder, symlinks=True)
        outcome = run(item, folder)
        yield item, outcome, faults(item, outcome)
        shutil.rmtree(folder, ignore_errors=True)
        tick()


def described(item: Input, outcome: Outcome, wrong: list[str]) -> dict[str, object]:
    """Return a faulty run as plain data."""
    return {
        "name": item.name,
        "args": [arg[:200] for arg in item.args],
        "faults": wrong,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 2),
        "megabytes": outcome.bytes >> 20,
        "output": outcome.output[-600:],
    }


def warm(source: Path, place: Path) -> None:
    """Import every module that the verbs import, so that no child has to."""
    from dovetail.cli import VERBS
    from dovetail.cli.command import command_of

    for verb in VERBS:
        command_of(verb)
    for verb, args in BASE.items():
        if verb in (
            "verify",
            "generate",
            "import",
            "export",
            "graft",
            "show",
            "diff",
            "emit",
            "map",
            "parts",
            "port",
            "data build",
            "data show",
            "plan",
            "tune",
            "runs",
            "quantize",
            "merge",
            "match",
            "chat",
            "can-serve",
            "tiny",
        ):
            folder = place / f"warm-{verb}"
            shutil.copytree(source, folder)
            here = os.getcwd()
            out, err = sys.stdout, sys.stderr
            try:
                os.chdir(folder)
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                dovetail(list(args))
            except SystemExit:
                pass
            finally:
                sys.stdout, sys.stderr = out, err
                os.chdir(here)
                shutil.rmtree(folder)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--inputs", type=int, help="run this many of the inputs")
    parser.add_argument("--kills", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", type=Path, help="write a line of JSON per faulty input")
    asked = parser.parse_args()
    os.environ.update(COLUMNS="100", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    count, killed = (60, 4) if asked.quick else (asked.inputs, asked.kills)
    found: Counter[str] = Counter()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, server() as port:
        place, source = Path(name), Path(name) / "fixtures"
        fixtures(source)
        more_fixtures(source)
        warm(source, place)
        inputs = every_input(asked.seed, port, [*ANSWERS, *STALLS], file_inputs(asked.seed))
        inputs = inputs[: count or len(inputs)]
        with progress("inputs", len(inputs)) as tick:
            for item, outcome, wrong in attack(inputs, source, place, tick):
                found.update(wrong)
                if wrong:
                    lines.append(json.dumps(described(item, outcome, wrong)))
        with progress("kills", killed) as tick:
            problems = list(kills(killed, random.Random(asked.seed), source, place, tick))
        lines += [json.dumps({"name": "kill", "problem": problem}) for problem in problems]
    if asked.list:
        asked.list.write_text("".join(f"{line}\n" for line in lines))
    half = sum("half written" in problem for problem in problems)
    rows = [Row("inputs", len(inputs), None if asked.quick or asked.inputs else Goal(low=2500))]
    rows += [Row(name, found[name], Goal(high=0)) for name in FAULTS]
    rows += [Row("kills", killed, None if asked.quick or asked.kills < 300 else Goal(low=300))]
    rows += [Row("half-written accepted", half, Goal(high=0)), Row("leftovers that block", len(problems) - half, Goal(high=0))]
    report(rows, asked.json)


if __name__ == "__main__":
    main()
