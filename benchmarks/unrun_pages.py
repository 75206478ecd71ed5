"""The commands of the pages that the docs build does not run, and what each page needs before it is run.

A page is a row of `PAGES`: its fixtures, the servers that its commands ask, and the commands that begin in a new folder because
an earlier command of the page writes the same names. `NOT_RUN` lists what cannot be run here, and `CHANGES` what is run
otherwise than it is written: another port, fewer tokens.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
MARK = re.compile(r"<!-- no run:(.*?)-->", re.DOTALL)
PROGRAM = re.compile(r"(dovetail|pytest|python|torchrun) (?!=)")  # a line of a block of text that begins so is a command


class Command(NamedTuple):
    """A line of a shell or a whole block of another language, its page and line, and the reason of its mark."""

    page: str
    line: int
    language: str
    text: str
    reason: str


def pages(root: Path = ROOT) -> list[Path]:
    """The pages, in order."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def commands(path: Path, root: Path = ROOT) -> list[Command]:
    """The commands of a page in the blocks that are marked `no run`, in order."""
    page = str(path.relative_to(root))
    return [
        Command(page, line, language, text, reason)
        for begin, language, body, reason in _marked(path.read_text(encoding="utf-8"))
        for line, text in _split(begin, language, body)
    ]


def _marked(text: str) -> Iterator[tuple[int, str, list[str], str]]:
    """(line of the fence, language, lines, reason) of each marked block."""
    before, lines = "", iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.startswith("```"):
            before = line if line.strip() else before
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.startswith("```"):
                break
            body.append(inner)
        if mark := MARK.fullmatch(before.strip()):
            yield number, line[3:].strip(), body, mark[1].strip()
        before = ""


def _split(begin: int, language: str, body: list[str]) -> Iterator[tuple[int, str]]:
    """(line, text) of each command of a block; a block that has none is one item."""
    shell, pending, first = language in ("bash", "console"), "", 0
    rest: list[str] = []
    for number, line in enumerate(body, begin + 1):
        if language == "console" and not pending:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if not shell and not (language == "text" and PROGRAM.match(line)):
            rest.append(line)
            continue
        first = first or number
        pending += line.removesuffix("\\") if line.endswith("\\") else line
        if not line.endswith("\\"):
            if pending.strip():
                yield first, pending.strip()
            pending, first = "", 0
    if any(line.strip() for line in rest):
        yield begin, "\n".join(rest).strip("\n")


@dc.dataclass(frozen=True)
class Page:
    """What the commands of a page need."""

    fixtures: tuple[str, ...] = ()
    servers: Mapping[int, str] = dc.field(default_factory=dict)  # port on the page -> the command that answers there
    fresh: Mapping[str, tuple[str, ...]] = dc.field(default_factory=dict)  # the begin of a command -> fixtures of a new folder
    before: tuple[tuple[str, str], ...] = ()  # (part of a Python block, code that runs before it)


RANKS = "torchrun --nproc-per-node 4"
DT = ("dt.", "import dovetail as dt")
PAGES = {
    "README.md": Page(servers={8000: "dovetail serve small"}),
    "docs/adapters.md": Page(("small", "notes.txt")),
    "docs/change.md": Page(("plays.txt", "llama-tiny-trained")),
    "docs/ci.md": Page(("package",)),
    "docs/dumps.md": Page(fresh={"dovetail record mlx": ("my-model", "dump")}),
    "docs/features.md": Page(("plays.txt",)),
    "docs/foreign.md": Page(("path/to/model",)),
    "docs/lab.md": Page(
        ("plays.txt", "lab.yaml", "llama-tiny-trained", "novel.txt", "docs/labs/muon.yaml"),
        fresh={"dovetail scaling": ("lab/runs",), "dovetail lab docs/labs": ("plays.txt", "docs/labs/muon.yaml")},
    ),
    "docs/parts.md": Page(
        ("notes.txt", "my-spec.yaml", "installed", "ema.py", "ema.yaml"),
        before=(('@oracle("offset")', "import sys; sys.path.insert(0, 'installed')\nimport offset_position"),),
    ),
    "docs/port.md": Page(("Qwen3-0.6B",), before=(("LLAMA.variant", "from dovetail.hf.dialect.mistral import LLAMA, Window"),)),
    "docs/python.md": Page(("Qwen3-0.6B", "ring.py"), before=(("split_ctx", "from ring import *"), DT)),
    "docs/quantization.md": Page(
        ("plays.txt", "llama-tiny-trained"), fresh={"dovetail quantize small": ("small", "notes.txt")}
    ),
    "docs/rollouts.md": Page(("my-model", "rollouts.jsonl", "train_data_step12.jsonl", "step-100", "step-110")),
    "docs/scale.md": Page(
        ("notes.txt", "run.yaml"),
        fresh=dict.fromkeys((RANKS + " -m", RANKS + " --max-restarts"), ("notes.txt", "run.yaml")),
    ),
    "docs/serve.md": Page(
        ("plays.txt", "Qwen3-0.6B", "small", "mixed", "base", "adapters/legal", "keys.txt", "admin.txt"),
        servers={8000: "dovetail serve Qwen3-0.6B --longest 256", 8123: "dovetail serve small"},
        before=(DT,),
    ),
    "docs/servers.md": Page(
        ("path/to/model",),
        servers={8000: "dovetail serve path/to/model", 8001: "dovetail serve path/to/model --speculate lookup"},
    ),
    "docs/start.md": Page(("notes.txt",)),
    "docs/train.md": Page(
        ("plays.txt", "stories", "letters"),
        fresh={
            "dovetail train llama-tiny --text notes.txt": ("notes.txt",),
            "dovetail train --from bert": ("bert-base-uncased", "entities.jsonl"),
            "dovetail export run-1": ("run-1",),
        },
    ),
    "docs/tune.md": Page(
        ("base", "chats.jsonl", "pairs.jsonl", "sums.jsonl"),
        fresh={
            "dovetail tune small": ("small", "chats.jsonl"),
            "dovetail train tiny.yaml": ("tiny.yaml", "notes.txt", "chats.jsonl", "pairs.jsonl"),
        },
    ),
    "docs/verify.md": Page(("my-model", "original", "mine.py", "my_model.py"), servers={8080: "dovetail serve my-model"}),
}

# (what the command calls, the environment of .peers that has it, why it is not run); one that is ready is used
NOT_RUN = (
    (r"^pip ", "", "installs packages: benchmarks/start.py runs the commands of docs/start.md in a new environment"),
    (r"^bash \.ci/run", "", "CI itself"),
    (r"^sbatch ", "", "needs a cluster: tests/deploy/test_slurm.py runs the script with a stand-in for srun"),
    (r"^kubectl ", "", "needs a cluster: tests/deploy checks the manifests against the schemas of Kubernetes"),
    (r"^serve run ", "ray", "needs Ray: tests/serve/http/test_ray_replicas.py"),
    (r"--engine vllm|vllm\.entrypoints", "vllm", "needs vLLM"),
    (r"record mlx|\bmlx:", "mlx", "needs mlx-lm"),
    (r"GRPOTrainer", "", "needs trl and a trainer"),
    (r"batch\.batch\[", "", "needs verl and a batch"),
    (r"^- uses:", "", "a workflow of GitHub: tests/outside/test_action.py runs the script of the action"),
    (r"^\[", "", "part of a configuration file"),
)
# (what is written, what is run instead, why)
CHANGES = (
    (r"--tokens (200M|2e8|20M)", "--tokens 20k", "hours of training"),
    (r"--flops 1e14", "--flops 5e9", "the law of runs of seconds holds for less"),
    (r"--host 0\.0\.0\.0", "--host 127.0.0.1", "listens on the loopback address"),
    (r'api_key="…"', 'api_key="a-key"', "a key in place of the dots"),
)
IN_CI = {
    "dovetail laws --json": ".ci/full laws runs it: python benchmarks/figures.py laws",
    "python -m checks.mutants": ".ci/full mutants runs it: python benchmarks/figures.py mutants",
}


def ready(peer: str) -> bool:
    """Whether the environment of a peer is here."""
    return bool(peer) and (PEERS / peer / "ready").is_file()


def not_run(command: Command) -> str | None:
    """Why a command is not run here; None if it is run."""
    if command.language not in ("bash", "console", "python") and not PROGRAM.match(command.text):
        return next((why for call, _, why in NOT_RUN if re.search(call, command.text)), command.reason)
    return next((why for call, peer, why in NOT_RUN if re.search(call, command.text) and not ready(peer)), None)


def peer_of(command: Command) -> str:
    """The environment of .peers that a command needs; '' for none."""
    return next((peer for call, peer, _ in NOT_RUN if peer and re.search(call, command.text)), "")
