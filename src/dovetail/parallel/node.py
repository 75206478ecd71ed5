"""A self-test of a node, before it joins the ranks of a run: a bad one costs the whole job, a missing one its share.

    matmul   products of integers in float32, exact, again and again: each must equal the exact product, on every device
    speed    GFLOP/s of the fastest of these
    memory   bytes that are available; a pattern is written and read
    disk     a file is written, synced, read back and deleted

Exact products find processors that compute wrongly now and then (silent data corruption).       Dixit et al. 2021
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import torch

from dovetail.base.memory import available_memory

SIZE, LARGEST, ROUNDS = 512, 8, 20  # of the matrices; 512 · 8 · 8 < 2²⁴: float32 is exact
PATTERN = 64 * 2**20  # bytes
FILE = 16 * 2**20


class NodeTest(NamedTuple):
    """One test: its name, whether the node passed, and what was found."""

    name: str
    passed: bool
    found: str


def node_tests(directory: Path, gflops: float = 0.0, memory: float = 0.0) -> list[NodeTest]:
    """Test every device, the memory, and the disk of a directory; at least so many GFLOP/s per device and GB of memory."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [*(_matmul(device, gflops) for device in devices), _memory(memory), _disk(directory)]


def _matmul(device: str, least: float) -> NodeTest:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randint(-LARGEST, LARGEST + 1, (SIZE, SIZE), generator=generator) for _ in range(2))
    exact = (a.double() @ b.double()).long().to(device)
    x, y = a.float().to(device), b.float().to(device)
    fastest, wrong = float("inf"), 0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        product = (x @ y).long()
        wrong += int((product != exact).sum().item())  # waits for the device
        fastest = min(fastest, time.perf_counter() - begin)
    speed = 2 * SIZE**3 / fastest / 1e9
    problem = f", {wrong:,} wrong elements of {ROUNDS * SIZE**2:,}" if wrong else f", {ROUNDS} products exact"
    limit = f", below {least:g}" if speed < least else ""
    return NodeTest(f"matmul on {device}", not wrong and speed >= least, f"{speed:.0f} GFLOP/s{limit}{problem}")


def _memory(least: float) -> NodeTest:
    available = available_memory()
    pattern = torch.arange(PATTERN // 8, dtype=torch.int64)
    intact = int(pattern.sum()) == len(pattern) * (len(pattern) - 1) // 2
    size = "unknown" if available is None else f"{available / 2**30:.1f} GB available"
    enough = available is None or available >= least * 2**30
    limit = "" if enough else f", below {least:g} GB"
    return NodeTest("memory", enough and intact, f"{size}{limit}{'' if intact else ', a pattern was read back differently'}")


def _disk(directory: Path) -> NodeTest:
    data, file = secrets.token_bytes(FILE), directory / f".dovetail-node-{os.getpid()}-{secrets.token_hex(4)}"
    begin = time.perf_counter()
    try:
        try:
            with file.open("xb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            same = file.read_bytes() == data
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        return NodeTest("disk", False, f"{directory}: {error.strerror}")
    speed = FILE / 2**20 / (time.perf_counter() - begin)
    return NodeTest("disk", same, f"{directory}: {f'{speed:.0f} MB/s' if same else 'a file was read back differently'}")
