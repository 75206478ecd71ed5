"""Processes for benchmarks/faults.py: ranks that are forked with the package loaded, and training runs with a fault.

    on_ranks(2, job, "plain", "data")          job(*data) on forked ranks that talk by gloo; the exit code and result of each
    Run(home, "out", ranks=2).start(fault)     `dovetail train` on forked ranks;  .launch(…): on ranks of torchrun

A fault is plain data that a rank reads from FAULT. It happens at the beginning of a step, counted from 1:

    {"kill": {restart: [rank, step]}}    SIGKILL, a real signal to the rank's own process
    {"interrupt": step}                  SIGINT, likewise
    {"hang": {restart: [rank, step]}}    data that never comes
    {"slow": [rank, seconds]}            data that comes late, in every step
    {"nan": step}                        a gradient that is not a number
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # imported by the first optimizer: before the forks, not in each
import torch.distributed as dist
import torch.distributed.fsdp

from dovetail.cli import main as dovetail
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import local
from dovetail.training.checkpoint import Checkpoints
from dovetail.training.step import Trainer

SPEC = """
width: 64
vocab: 512
layers:
- repeat: 4
  mixer: {heads: 4, kv_heads: 2, head: 16, dropout: 0.1}
  ffn: {hidden: 172}
"""
PATIENCE = 300.0  # seconds after which a process that should have ended is killed
FAULT = "DOVETAIL_FAULT"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


class Ended(NamedTuple):
    """How a forked process ended: its exit code, or minus the signal; the result of its job, where it has one."""

    code: int
    result: Any


# -- forked processes -------------------------------------------------------------------------------------------------------


def fork(job: Callable[[], Any], output: Path) -> int:
    """Run a job in a forked process: its result goes to `output` as JSON, what it prints to `output`.err."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        handle = os.open(f"{output}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(handle), "w", buffering=1)
        output.write_text(json.dumps(job()))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, output: Path, seconds: float = PATIENCE) -> Ended:
    """Wait for a forked process; it is killed after some seconds."""
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            text = output.read_text() if output.exists() else ""
            return Ended(os.waitstatus_to_exitcode(status), json.loads(text) if text else None)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def in_child(job: Callable[..., Any], *data: Any) -> Any:
    """The result of a job in a forked process: this one stays without threads, so that it can be forked again."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "result"
        ended = wait(fork(functools.partial(job, *data), output), output)
        if ended.code:
            raise SystemExit(f"{job.__name__} exited with {ended.code}\n{Path(f'{output}.err').read_text()[-3000:]}")
        return ended.result


def on_ranks(count: int, job: Callable[..., Any], *data: Any) -> list[Ended]:
    """Run a job on ranks of one process group."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place) / f"rank-{rank}" for rank in range(count)]

        def serve(rank: int) -> Any:
            store = dist.FileStore(f"{place}/store", count)  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
            result = job(*data)
            dist.destroy_process_group()
            return result

        children = [fork(functools.partial(serve, rank), output) for rank, output in enumerate(outputs)]
        return [wait(child, output) for child, output in zip(children, outputs, strict=True)]


def results(ended: Sequence[Ended]) -> list[Any]:
    """The results of ranks, all of which must have ended well."""
    if any(one.code for one in ended):
        raise SystemExit(f"ranks ended with {[one.code for one in ended]}")
    return [one.result for one in ended]


# -- training runs ----------------------------------------------------------------------------------------------------------


@dc.dataclass(frozen=True)
class Run:
    """`dovetail train` in a directory of `home`, which has a spec and token shards."""

    home: Path
    out: str
    steps: int
    ranks: int = 1
    flags: tuple[str, ...] = ("--checkpoint-minutes=0",)
    spec: str = "spec.yaml"

    @property
    def args(self) -> list[str]:
        sizes = ["--batch=4", "--length=32", "--sample=0", f"--steps={self.steps}"]
        return ["train", self.spec, "--data=data", *sizes, "-o", self.out, *self.flags]

    @property
    def place(self) -> Path:
        return self.home / self.out

    def start(self, fault: dict[str, Any] | None = None) -> list[int]:
        """Fork the ranks; the exit codes and what they print are found by `end`."""
        port = str(free_port())

        def train(rank: int) -> None:
            env = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update(env if self.ranks > 1 else {})
            os.chdir(self.home)
            with faulty(fault or {}):
                dovetail(self.args)

        return [fork(functools.partial(train, rank), self._output(rank)) for rank in range(self.ranks)]

    def end(self, children: Sequence[int]) -> list[int]:
        """Wait for the ranks; return their exit codes."""
        return [wait(child, self._output(rank)).code for rank, child in enumerate(children)]

    def finish(self, fault: dict[str, Any] | None = None) -> list[int]:
        """Run to the end."""
        return self.end(self.start(fault))

    def errors(self, rank: int = 0) -> str:
        """What a forked rank printed."""
        return Path(f"{self._output(rank)}.err").read_text()

    def launch(self, fault: dict[str, Any], *torchrun: str) -> subprocess.Popen[bytes]:
        """Start the ranks by torchrun; what they print is in `torchrun.err` of home."""
        return self._torchrun(fault, "torchrun.err", "--standalone", f"--nproc-per-node={self.ranks}", *torchrun)

    def agent(self, node: int, port: int, *torchrun: str) -> subprocess.Popen[bytes]:
        """Start torchrun as one of several nodes, all on this host, with one rank each; what it prints is in `node-N.err`."""
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "--local-addr=127.0.0.1")
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # per attempt: nodes count restarts differently
        return self._torchrun({}, f"node-{node}.err", "--nproc-per-node=1", *rendezvous, *torchrun, env=own_store)

    def _torchrun(
        self, fault: dict[str, Any], output: str, *flags: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        env = {**os.environ, **(env or {}), FAULT: json.dumps(fault), "OMP_NUM_THREADS": "1"}
        with (self.home / output).open("w") as file:
            command = [sys.executable, "-m", "torch.distributed.run", *flags, __file__, *self.args]
            return subprocess.Popen(command, cwd=self.home, env=env, stdout=file, stderr=file)

    def losses(self) -> list[float]:
        """The loss of each step so far."""
        file = self.place / "loss.jsonl"
        return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []

    def digests(self) -> dict[str, str]:
        """sha256 of the weights, and of every file of the last checkpoint: weights, optimizer."""
        last = Checkpoints(self.place / "checkpoints").complete()[-1]
        files = [self.place / "model.safetensors", *sorted(last.glob("*.safetensors"))]
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def _output(self, rank: int) -> Path:
        return self.home / f"{self.out}.rank-{rank}"


def make_home(home: Path) -> Path:
    """Write the spec and token shards."""
    import dovetail as dt

    home.mkdir(parents=True, exist_ok=True)
    (home / "spec.yaml").write_text(SPEC)
    lines = [json.dumps({"text": f"Once there were {i} foxes, and {i * i % 71} hens in {i % 7} woods."}) for i in range(2000)]
    (home / "tales.jsonl").write_text("\n".join(lines))
    dt.build_data([str(home / "tales.jsonl")], out=home / "data", tokenizer="bytes", held_out=0.02, workers=1, quiet=True)
    return home


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def faulty(fault: dict[str, Any]) -> Iterator[None]:
    """Within this context, a step of a Trainer begins with its fault; each step that a rank finishes is written to STEPS."""
    step_of, rank = Trainer.step, int(os.environ.get("RANK", "0"))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    kill, hang = (list(fault.get(name, {}).get(restart, ())) for name in ("kill", "hang"))
    slow_rank, seconds = fault.get("slow", (None, 0))

    def step(self: Trainer, batch: Any, number: int, *args: Any) -> Any:
        if [rank, number + 1] == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if [rank, number + 1] == hang:
            data_that_never_comes()
        if rank == slow_rank:
            time.sleep(seconds)
        if number + 1 == fault.get("interrupt") and rank == self.ranks.count - 1:
            os.kill(os.getpid(), signal.SIGINT)
        if number + 1 == fault.get("nan"):
            return _with_nan(self, lambda: step_of(self, batch, number, *args))
        found = step_of(self, batch, number, *args)
        if rank == 0:
            with Path("steps.log").open("a") as log:
                log.write(f"{restart} {number + 1}\n")
        return found

    Trainer.step = step  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Trainer.step = step_of


def data_that_never_comes() -> None:
    """Wait as a reader of a file system that is gone does."""
    time.sleep(PATIENCE)


def _with_nan(trainer: Trainer, step: Callable[[], Any]) -> Any:
    """A step in which one element of one gradient is not a number; whether a tensor changed goes to `nan.json`."""

    def spoil(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        local(weight.grad).view(-1)[:1] = float("nan")

    tensor_at(trainer.model, "layers.1.ffn.down.weight").register_post_accumulate_grad_hook(spoil)
    before = {name: local(value).clone() for name, value in trainer.tensors().items()}
    try:
        return step()
    finally:
        same = [torch.equal(before[name], local(value)) for name, value in trainer.tensors().items()]
        names = [name for name, one in zip(before, same, strict=True) if not one]
        Path("nan.json").write_text(json.dumps({"tensors": len(same), "changed": len(names), "names": names}))


if __name__ == "__main__":
    with faulty(json.loads(os.environ[FAULT])):
        dovetail(sys.argv[1:])
