"""Peers in environments of their own: processes that take requests to decode (benchmarks/peers)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.model import ModelModule
from dovetail.port.hf import export_tensors, to_hf

PEERS, ENVIRONMENTS = Path(__file__).parent / "peers", Path(__file__).parents[1] / ".peers"


class LlamaCpp:
    """llama.cpp with the weights of one of our Llamas: greedy decoding of a few rows behind a prompt (rows, n)."""

    python, ready = ENVIRONMENTS / "llama.cpp/bin/python", ENVIRONMENTS / "llama.cpp/ready"

    def __init__(self, model: ModelModule, prompt: Tensor, new: int, dtype: str, threads: int) -> None:
        """`dtype` is f32, with a cache in f32, or bf16, with the cache in f16 that is its default."""
        capacity = prompt.shape[1] + new + 8
        config = dict(to_hf(model.part, length=capacity).config)
        assert config["model_type"] == "llama", "the worker writes Llamas alone"
        self.start = prompt.shape[1]
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(config))
            tensors = export_tensors(model.part, model.state_dict())
            save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, f"{place}/model.safetensors")
            options = {"threads": threads, "dtype": dtype, "rows": len(prompt), "capacity": capacity}
            command = [self.python, PEERS / "llama_cpp_worker.py", place, *(f"--{k}={v}" for k, v in options.items())]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.version = self._answer()["version"]
        self.first = torch.tensor(self.ask(prompt=prompt.tolist())["tokens"])

    def ask(self, **what: Any) -> dict[str, Any]:
        """Send a line and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with exit code {self.process.wait()}")
        return json.loads(line)

    def decode(self, steps: int) -> tuple[Tensor, float]:
        """The tokens (rows, steps) behind the first one, and the seconds they took."""
        self.ask(back=self.start)
        answer = self.ask(steps=steps)
        return torch.tensor(answer["tokens"]), answer["seconds"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
