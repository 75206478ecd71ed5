"""How often the laws of servers raise a false alarm on real servers, and how long they take.

    python benchmarks/servers.py [--json] [--runs 2] [--servers dovetail vllm …] [--dtypes float32] [--table FILE]

Each server of real_servers.py serves a tiny random Llama on 127.0.0.1, in float32 and bfloat16, and is asked by the laws of
`dovetail laws http://…`, as often as --runs with other seeds. In every other run the laws are not given the dtype, as a user
would who does not know it. A law run is one law on one server with one seed. Rows per server and dtype:

    clean law runs          laws that passed
    false alarms            laws that failed although the server has no fault which docs/upstream.md shows
    faults of the server    laws that failed because of such a fault
    laws not applicable     the server lacks what the law needs
    seconds                 of one run of all laws with its questions and calibration; the slowest

A server that cannot be started is left out with a message, and the number of servers is a row.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses as dc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, arguments, progress, report
from real_servers import SERVERS, VOCABULARIES, Server, as_gguf, running, write_model

from dovetail.base.errors import FileError
from dovetail.proof.served.run import SERVED, calibrated, opened
from dovetail.text.tokenizer import Tokenizer

LOG = 3000  # characters of a server's log that an error shows
SECONDS = 300  # goal for one run of all laws
CLEAN = 200  # goal for clean law runs in total, with the default of --runs and all servers


@dc.dataclass(frozen=True)
class Run:
    """The laws on one server with one seed."""

    server: str
    dtype: str
    seed: int
    seconds: float
    laws: tuple[dict[str, Any], ...]
    bound: float
    noise: tuple[float, float, float]
    quirks: dict[str, Any]

    def count(self, state: str) -> int:
        """The number of laws in a state."""
        return sum(one["state"] == state for one in self.laws)


def tested(server: Server, dtype: str, seeds: Sequence[int], place: Path, given: argparse.Namespace) -> list[Run]:
    """Start a server, and run the laws on it once per seed."""
    vocabulary = given.vocabulary or ("characters" if server.text else "pieces")
    directory = write_model(place / "tiny", vocabulary, "float32" if server.gguf else dtype)  # GGUF rounds by itself
    model = as_gguf(directory, dtype, server.python()) if server.gguf else directory
    found: list[Run] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(with_log(place / "server.log"))
        plain = stack.enter_context(running(server, model, dtype, place / "server.log"))
        url, against = plain, None
        if server.speculation and "speculated" in SERVED.names(given.only):
            url = stack.enter_context(running(server, model, dtype, place / "speculation.log", speculation=True))
            against = plain
        for seed in seeds:
            begin = time.perf_counter()
            options: dict[str, Any] = {"model": str(model)} if server.by_path else {}
            options |= {"tokenizer": Tokenizer.load(directory)} if server.text else {}
            options |= {"dtype": dtype} if seed % 2 else {}
            case = calibrated(opened(url, against=against, seed=seed, **options))
            laws = tuple(dc.asdict(SERVED.test(name, case)) for name in SERVED.names(given.only))
            noise = (case.noise.repeat, case.noise.concurrent, case.noise.prefill)
            found.append(
                Run(
                    server.name,
                    dtype,
                    seed,
                    time.perf_counter() - begin,
                    judged(server, laws),
                    case.bound,
                    noise,
                    case.quirks.data(),
                )
            )
            shown(found[-1])
    return found


@contextlib.contextmanager
def with_log(log: Path) -> Iterator[None]:
    """Put the end of the server's log behind an error."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{error}\n{log.read_text(errors='replace')[-LOG:] if log.exists() else ''}") from error


def judged(server: Server, laws: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The laws; one that fails by a known fault of the server is `fault`, not `failed`."""
    return tuple({**one, "state": "fault"} if one["state"] == "failed" and one["law"] in server.faults else one for one in laws)


def shown(run: Run) -> None:
    """Print what a person needs to follow an alarm."""
    states = collections.Counter(one["state"] for one in run.laws)
    head = f"{run.server} {run.dtype} seed {run.seed}: {dict(states)}, {run.seconds:.0f} s, bound {run.bound:.3g}"
    print(head, file=sys.stderr)
    for one in run.laws:
        if one["state"] != "passed":
            print(f"    {one['law']}: {one['state']}: {one['detail']}", file=sys.stderr)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """The rows of every server and dtype, and of all."""
    rows: list[Row] = []
    pairs = dict.fromkeys((run.server, run.dtype) for run in runs)
    for server, dtype in pairs:
        mine = [run for run in runs if (run.server, run.dtype) == (server, dtype)]
        slowest = max(run.seconds for run in mine)
        rows += [
            Row(f"{server}, {dtype}: clean law runs", sum(run.count("passed") for run in mine)),
            Row(f"{server}, {dtype}: false alarms", sum(run.count("failed") for run in mine), Goal(high=0)),
            Row(f"{server}, {dtype}: faults of the server", sum(run.count("fault") for run in mine)),
            Row(f"{server}, {dtype}: laws not applicable", sum(run.count("not applicable") for run in mine)),
            Row(f"{server}, {dtype}: seconds", slowest, Goal(high=SECONDS)),
        ]
    total = {state: sum(run.count(state) for run in runs) for state in ("passed", "failed")}
    return [
        *rows,
        Row("clean law runs", total["passed"], Goal(low=CLEAN)),
        Row("false alarms", total["failed"], Goal(high=0)),
        Row("servers", len({server for server, _ in pairs})),
        Row("load average of the machine, 15 minutes", os.getloadavg()[2]),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="default: all")
    parser.add_argument("--dtypes", nargs="+", help="default: all that a server has")
    parser.add_argument("--runs", type=int, default=3, help="seeds per server and dtype")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="*", default=(), help="laws; default: all")
    parser.add_argument("--vocabulary", choices=VOCABULARIES, help="default: characters where a server takes text alone")
    parser.add_argument("--table", type=Path, help="write every run as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended too
    seeds = range(given.seed, given.seed + (1 if given.quick else given.runs))
    jobs = [(SERVERS[name], dtype) for name in given.servers for dtype in SERVERS[name].dtypes]
    jobs = [(server, dtype) for server, dtype in jobs if not given.dtypes or dtype in given.dtypes]
    runs: list[Run] = []
    versions, peers = dict[str, str](), dict[str, Any]()
    with progress("servers", len(jobs)) as tick:
        for server, dtype in jobs:
            try:
                versions[server.package] = server.version()
                peers[f"{server.name}, {dtype}"] = server.described(dtype)
                with tempfile.TemporaryDirectory(prefix="dovetail-servers-") as folder:
                    runs += tested(server, dtype, seeds, Path(folder), given)
            except FileError as error:
                print(f"{server.name}, {dtype}: left out: {error}", file=sys.stderr)
            tick()
    if given.table is not None:
        given.table.write_text(json.dumps([dc.asdict(run) for run in runs], indent=1) + "\n")
    report(rows_of(runs), given.json, versions, peers)


if __name__ == "__main__":
    main()
