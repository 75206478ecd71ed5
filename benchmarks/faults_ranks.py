"""Faults of ranks under torchrun, in several layouts: killed, stopped, hung and slow ranks  (rows of faults.py)."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from faults_checkpoints import loaded_by, saved_by
from faults_process import Run, free_port, make_home, on_ranks, results
from faults_runs import NONE, expect
from measure import Goal, Row


class Layout(NamedTuple):
    """A number of ranks, of which some share each layer; FSDP shards over the others."""

    ranks: int
    tensor: int = 1

    def __str__(self) -> str:
        data = self.ranks // self.tensor
        return " × ".join(f"{name} {size}" for name, size in (("FSDP", data), ("TP", self.tensor)) if size > 1) or "1 rank"

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.tensor == 1 else (f"--tensor={self.tensor}",)


TWO, FOUR, PRODUCT = Layout(2), Layout(4), Layout(4, 2)
LAYOUTS = (Layout(1), TWO, FOUR, Layout(2, 2), PRODUCT)


def c7(
    place: Path, steps: int = 60, killed: tuple[int, ...] = (13, 29, 41), layouts: tuple[Layout, ...] = (TWO, FOUR, PRODUCT)
) -> list[Row]:
    """SIGKILL a rank under torchrun with restarts."""
    return [row for i, layout in enumerate(layouts) for row in _killed(make_home(place / str(i)), layout, steps, killed)]


def _killed(home: Path, layout: Layout, steps: int, killed: tuple[int, ...]) -> list[Row]:
    flags = ("--checkpoint-minutes=0", *layout.flags)
    whole, broken = (Run(home, name, steps, layout.ranks, flags) for name in ("whole", "broken"))
    expect(whole.finish(), 0, whole)
    (home / "steps.log").unlink()
    plan = {str(restart): (layout.ranks - 1 - restart % layout.ranks, step) for restart, step in enumerate(killed)}
    code = broken.launch({"kill": plan}, f"--max-restarts={len(killed)}").wait()
    trained = [tuple(map(int, line.split())) for line in (home / "steps.log").read_text().splitlines()]
    by_restart = [[step for restart, step in trained if restart == i] for i in range(len(killed) + 1)]
    lost = [max(a) - min(b) + 1 for a, b in itertools.pairwise(by_restart) if a and b]
    on = f"C7 {layout}"
    at = ", ".join(map(str, killed))
    return [
        Row(f"{on}: torchrun, SIGKILL of a rank at steps {at}: steps reached", len(broken.losses()), Goal(low=steps)),
        Row(f"{on}: exit code of torchrun", code, NONE),
        Row(f"{on}: restarts", len(by_restart) - 1 if all(by_restart) else -1, Goal(len(killed), len(killed))),
        *_equal(on, whole, broken),
        Row(f"{on}: most steps lost at a kill; a checkpoint is taken after each", max(lost, default=-1), Goal(0, 1)),
    ]


def c8(place: Path, timeout: int = 10, within: int = 20, layouts: tuple[Layout, ...] = (TWO, FOUR, PRODUCT)) -> list[Row]:
    """SIGSTOP a rank under torchrun."""
    return [row for i, one in enumerate(layouts) for row in _stopped(make_home(place / str(i)), one, timeout, within)]


def _stopped(home: Path, layout: Layout, timeout: int, within: int) -> list[Row]:
    flags = ("--checkpoint-minutes=0.02", f"--timeout={timeout}", *layout.flags)
    run = Run(home, "run", 100_000, layout.ranks, flags)
    launcher = run.launch({})
    _wait_for_steps(run, launcher, 5)
    ranks = [int(rank) for rank in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    begin = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    while any(map(_alive, ranks)) and time.monotonic() - begin < 6 * within:
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    orphans = [rank for rank in ranks if _alive(rank)]
    for rank in orphans:
        os.kill(rank, signal.SIGKILL)
    code = launcher.wait(120)
    launched = time.monotonic() - begin
    errors = (run.home / "torchrun.err").read_text()
    stacks = ("Fatal Python error: Aborted" in errors) + ("Timed out waiting" in errors and "Traceback" in errors)
    named = f"rank 1 ({socket.gethostname()}, process {ranks[1]}) did not arrive, last seen at step "
    on = f"C8 {layout}"
    return [
        Row(f"{on}: SIGSTOP of a rank, group time-out {timeout} s: seconds until no rank is left", seconds, Goal(high=within)),
        Row(f"{on}: seconds until torchrun has ended", launched),
        Row(f"{on}: stacks on stderr, of the rank that was stopped and of one that waited", stacks, Goal(low=2)),
        Row(f"{on}: the error names rank, host, step and phase", float(_names(errors, named)), Goal(low=1)),
        Row(f"{on}: orphans", len(orphans), NONE),
        Row(f"{on}: exit code of torchrun", code, Goal(low=1)),
    ]


def c12(
    place: Path, steps: int = 20, at: int = 7, timeout: int = 20, layouts: tuple[Layout, ...] = (FOUR, PRODUCT)
) -> list[Row]:
    """A rank whose data never comes, under torchrun with one restart."""
    rows = list[Row]()
    for i, layout in enumerate(layouts):
        home = make_home(place / str(i))
        flags = ("--checkpoint-minutes=0", f"--timeout={timeout}", *layout.flags)
        whole, broken = (Run(home, name, steps, layout.ranks, flags) for name in ("whole", "broken"))
        expect(whole.finish(), 0, whole)
        code = broken.launch({"hang": {"0": (1, at)}}, "--max-restarts=1").wait()
        errors = (home / "torchrun.err").read_text()
        named = _names(errors, f"rank 1 ({socket.gethostname()}, process ", f"did not arrive, step {at}, phase data, for ")
        on = f"C12 {layout}: data of a rank that never comes, group time-out {timeout} s"
        rows += [
            Row(f"{on}: the error names rank, host, step and phase", float(named), Goal(low=1)),
            Row(f"{on}: the stack of that rank is on stderr", float("in data_that_never_comes" in errors), Goal(low=1)),
            Row(f"{on}: exit code of torchrun --max-restarts=1", code, NONE),
            *_equal(on, whole, broken),
        ]
    return rows


def c13(place: Path, steps: int = 45, seconds: float = 1.0, layouts: tuple[Layout, ...] = (TWO, PRODUCT)) -> list[Row]:
    """A rank whose data comes late in every step, and none."""
    rows = list[Row]()
    for i, layout in enumerate(layouts):
        home = make_home(place / str(i))
        for slow in (1, None):
            run = Run(home, f"slow-{slow}", steps, layout.ranks, ("--checkpoint-minutes=9", *layout.flags))
            expect(run.finish({} if slow is None else {"slow": (slow, seconds)}), 0, run)
            named = set(map(int, re.findall(rf"rank (\d+) \({re.escape(socket.gethostname())}\) is slow", run.errors())))
            wrong = len(named ^ ({slow} - {None}))
            which = f"data of rank {slow} comes {seconds:g} s late" if slow is not None else "all ranks alike"
            rows.append(Row(f"C13 {layout}, {which}, {steps} steps: ranks wrongly named or missed as stragglers", wrong, NONE))
    return rows


def c14(place: Path, layouts: tuple[Layout, ...] = LAYOUTS) -> list[Row]:
    """A checkpoint of every layout, loaded in every other."""
    saved = {one: results(on_ranks(one.ranks, saved_by, str(place / str(one)), one.tensor, 1))[0] for one in layouts}
    rows = list[Row]()
    for here, there in itertools.permutations(layouts, 2):
        loaded = results(on_ranks(there.ranks, loaded_by, str(place / str(here)), there.tensor))
        differing = sum(one[name] != value for one in loaded for name, value in saved[here].items())
        rows.append(Row(f"C14 saved on {here}, loaded on {there}: of {len(saved[here])} tensors, differing", differing, NONE))
    return rows


def c15(place: Path, steps: int = 60, killed: int = 8) -> list[Row]:
    """One of two nodes killed for good under torchrun --nnodes 1:2: the other continues alone, on the same batches."""
    home, port = make_home(place), free_port()
    whole, broken = (Run(home, name, steps, 2, ("--checkpoint-minutes=0", "--timeout=30")) for name in ("whole", "broken"))
    expect(whole.finish(), 0, whole)
    conf = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"
    flags = ("--nnodes=1:2", "--max-restarts=3", conf)
    nodes = [broken.agent(0, port, *flags)]
    _wait_for_port(port, nodes[0])  # the first has the store of the rendezvous
    nodes.append(broken.agent(1, port, *flags))
    try:
        _wait_for_steps(broken, nodes[0], killed)
        worlds = _worlds(nodes)
        nodes[1].kill()
        begin = time.monotonic()
        nodes[1].wait()
        alone = len(broken.losses())
        _wait_for_steps(broken, nodes[0], alone + 3)
        seconds = time.monotonic() - begin
        code = nodes[0].wait(600)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    apart = max(abs(a - b) / b for a, b in zip(broken.losses(), whole.losses(), strict=False))
    on = "C15 torchrun --nnodes=1:2, a node killed for good"
    return [
        Row(f"{on}: nodes that trained before", sum(map(bool, worlds)), Goal(2, 2)),
        Row(f"{on}: steps reached", len(broken.losses()), Goal(steps, steps)),
        Row(f"{on}: exit code of the other", code, NONE),
        Row(f"{on}: seconds until the other trains alone", seconds),
        Row(f"{on}: largest relative difference of a loss, in millionths", 1e6 * apart, Goal(high=100)),
    ]


def _worlds(nodes: list[subprocess.Popen[bytes]]) -> list[str]:
    """The ranks of each node."""
    return [Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().strip() for node in nodes]


def _wait_for_port(port: int, launcher: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if launcher.poll() is not None or time.monotonic() > until:
            raise SystemExit("torchrun does not listen for a rendezvous")
        time.sleep(0.1)


def _equal(on: str, whole: Run, broken: Run) -> list[Row]:
    differing = sum(a != b for a, b in zip(whole.losses(), broken.losses(), strict=False))
    return [
        Row(f"{on}: losses that differ from the run without faults", differing, NONE),
        Row(f"{on}: sha256 of weights that differ", float(_model(whole) != _model(broken)), NONE),
    ]


def _names(errors: str, *phrases: str) -> bool:
    """Whether a line has all phrases."""
    return any(all(phrase in line for phrase in phrases) for line in errors.splitlines())


def _wait_for_steps(run: Run, launcher: subprocess.Popen[bytes], steps: int) -> None:
    until = time.monotonic() + 300
    while len(run.losses()) < steps:
        if launcher.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"torchrun did not train\n{(run.home / 'torchrun.err').read_text()[-3000:]}")
        time.sleep(0.1)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _model(run: Run) -> Any:
    file = run.place / "model.safetensors"
    return run.digests()["model.safetensors"] if file.exists() else run.out
