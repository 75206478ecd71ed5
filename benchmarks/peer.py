"""Peers that generate: Hugging Face in this process, others in environments of their own (benchmarks/peers), as processes that
take requests. All have the weights of one of our Llamas, and take the most probable token."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measure import seconds
from safetensors.torch import save_file
from torch import Tensor

from dovetail.hf.hf import export_tensors, to_hf
from dovetail.model.model import ModelModule

PEERS, ENVIRONMENTS = Path(__file__).parent / "peers", Path(__file__).parents[1] / ".peers"


PEERS_RUN: dict[str, list[dict[str, Any]]] = {}  # how the peers of this process were run, for the figure


def noted(name: str, settings: dict[str, Any]) -> None:
    """Note how a peer is run, once for each setting."""
    known = PEERS_RUN.setdefault(name, [])
    if settings not in known:
        known.append(settings)


def hugging_face(model: ModelModule, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """transformers' generate with a static cache and a compiled forward, for a prompt (rows, n): the new tokens (rows, new)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(to_hf(model.part, length=prompt.shape[1] + new).config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = AutoModelForCausalLM.from_config(config).to(next(model.parameters()).dtype).eval()
    tensors = export_tensors(model.part, model.state_dict())
    theirs.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    theirs.forward = torch.compile(theirs.forward, fullgraph=True)
    theirs.generation_config.eos_token_id = None
    settings = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    noted("transformers", {"version": version("transformers"), "compiled": "forward, fullgraph", "generate": settings})

    @torch.no_grad()
    def generated() -> Tensor:
        return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, prompt.shape[1] :]

    return generated


def ready(name: str) -> bool:
    """Whether the environment of a peer is there."""
    return (ENVIRONMENTS / name / "ready").exists()


def require(name: str) -> None:
    """Stop where the environment of a peer is missing."""
    if not ready(name):
        raise SystemExit(f"{name}: its environment is missing; run benchmarks/peers/make {name}, or leave it out")


class Process:
    """A worker in the environment `name`: it writes its version, then answers each line of JSON with a line."""

    def __init__(self, name: str, worker: str, *arguments: str) -> None:
        require(name)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # a peer has its own packages
        command = [str(ENVIRONMENTS / name / "bin/python"), str(PEERS / worker), *arguments]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        told = self._answer()
        self.version: str = told["version"]
        settings = {"environment": f".peers/{name}", "worker": worker, "version": self.version, **told.get("settings", {})}
        noted(name, {**settings, "arguments": [one for one in arguments if not Path(one).is_dir()]})

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
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # it has given all answers; on a busy machine Python takes as long to end
            self.process.kill()
            self.process.wait()


class Llama(Process):
    """A worker with the weights of one of our Llamas, for a prompt (rows, n) and `new` tokens; `dtype` is f32 or bf16."""

    def __init__(self, name: str, worker: str, model: ModelModule, prompt: Tensor, new: int, dtype: str, threads: int) -> None:
        self.prompt, capacity = prompt, prompt.shape[1] + new + 8
        config = dict(to_hf(model.part, length=capacity).config)
        assert config["model_type"] == "llama", "the workers read Llamas alone"
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(config))
            tensors = export_tensors(model.part, model.state_dict())
            save_file({key: tensor.float().contiguous() for key, tensor in tensors.items()}, f"{place}/model.safetensors")
            options = {"threads": threads, "dtype": dtype, "rows": len(prompt), "capacity": capacity}
            super().__init__(name, worker, place, *(f"--{key}={value}" for key, value in options.items()))

    def generate(self, new: int) -> tuple[Tensor, float]:
        """The tokens (rows, new) that follow the prompt, and the seconds they took, the prompt included."""
        raise NotImplementedError


class Litgpt(Llama):
    """litgpt's generate, with its cache and, for one row, the step that it compiles."""

    def __init__(self, model: ModelModule, prompt: Tensor, new: int, dtype: str, threads: int) -> None:
        super().__init__("litgpt", "litgpt_worker.py", model, prompt, new, dtype, threads)

    def generate(self, new: int) -> tuple[Tensor, float]:
        answer = self.ask(prompt=self.prompt.tolist(), new=new)
        return torch.tensor(answer["tokens"]), answer["seconds"]


class LlamaCpp(Llama):
    """llama.cpp, each row a sequence. In f32 its cache is in f32, in bf16 in f16, which is its default."""

    def __init__(self, model: ModelModule, prompt: Tensor, new: int, dtype: str, threads: int) -> None:
        super().__init__("llama.cpp", "llama_cpp_worker.py", model, prompt, new, dtype, threads)
        self.first = torch.tensor(self.ask(prompt=prompt.tolist())["tokens"])

    def decode(self, steps: int) -> tuple[Tensor, float]:
        """The tokens (rows, steps) behind the first one, and the seconds they took."""
        self.ask(back=self.prompt.shape[1])
        answer = self.ask(steps=steps)
        return torch.tensor(answer["tokens"]), answer["seconds"]

    def generate(self, new: int) -> tuple[Tensor, float]:
        self.ask(back=0)
        first = self.ask(prompt=self.prompt.tolist())
        rest = self.ask(steps=new - 1)
        tokens = torch.cat([torch.tensor(first["tokens"])[:, None], torch.tensor(rest["tokens"])], 1)
        return tokens, first["seconds"] + rest["seconds"]


def against_process(
    ours: Callable[[], object], theirs: Callable[[], float], rounds: int, tick: Callable[[], None]
) -> list[float]:
    """The seconds that a process reports ÷ those of ours in each round, after one warm-up round; the first one alternates."""
    ratios: list[float] = []
    for i in range(rounds + 1):
        if i % 2:
            of_theirs, of_ours = theirs(), seconds(ours)
        else:
            of_ours, of_theirs = seconds(ours), theirs()
        ratios.append(of_theirs / of_ours)
        tick()
    return ratios[1:]
