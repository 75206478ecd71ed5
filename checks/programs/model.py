"""Programs of a model: training, evaluation, generation, traces, adapters, banks, quantization, files and dtypes, in any order.
After each call the model computes what a fresh object with the same weights does, and is in the mode that the caller set.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dovetail as dt
from checks.programs.frame import Kind, Session, Step, wrong
from dovetail.base.errors import DovetailError
from dovetail.decoding.steps import Decoder
from dovetail.proof.laws.case import perturbed
from dovetail.state.pool import Pool
from dovetail.weights.adapters.attach import MergedWeights, attach, detach, merge
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.multi_lora import Bank
from dovetail.weights.adapters.storage import adapter_tensors, set_adapter

VOCAB = 40
_MIXER = "mixer: {heads: 2, kv_heads: 1, head: 6, dropout: 0.3}"
_FFN = "ffn: {hidden: 16}"
_MAMBA = "mixer: {kind: mamba2, inner: 24, head: 6, state_size: 4}"
_LAYERS = {
    "attention": f"{{repeat: 2, {_MIXER}, {_FFN}}}",
    "shared layers": f"{{{_MIXER}, {_FFN}}}, {{{_MIXER}, {_FFN}, shares: 0}}",
    "hybrid": f"{{{_MAMBA}, {_FFN}}}, {{{_MIXER}, {_FFN}}}",
}
SPECS = {name: f"{{width: 12, vocab: {VOCAB}, dropout: 0.3, layers: [{layers}]}}" for name, layers in _LAYERS.items()}
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the largest logit
CALLS = {
    "logits": 6, "generate": 10, "decoder": 6, "trace": 6, "loss": 10, "mode": 8, "attach": 5, "detach": 4, "merge": 3,
    "undo": 2, "freeze": 3, "load_bank": 5, "unload_bank": 3, "rows": 4, "quantize": 1, "save": 3, "cast": 3,
}  # fmt: skip
KIND = Lora(rank=2)


@cache
def _first(name: str) -> Any:
    return perturbed(dt.from_yaml(SPECS[name]), 0)


@cache
def adapter_of(name: str, seed: int) -> dict[str, Tensor]:
    """The tensors of an adapter of a model."""
    model, generator = copy.deepcopy(_first(name)), torch.Generator().manual_seed(seed)
    attach(model, KIND)
    return {
        path: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3
        for path, tensor in adapter_tensors(model).items()
    }


class ModelKind(Kind):
    """A model with its weights."""

    name = "model"
    share = 2.0

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        steps = list[Step]()
        for _ in range(rng.randint(3, 14)):
            call = rng.choices(list(CALLS), list(CALLS.values()))[0]
            seed = {"seed": rng.randrange(4)}
            steps.append(
                {
                    "logits": lambda seed=seed: ("logits", seed),
                    "generate": lambda seed=seed: ("generate", {**seed, "max_tokens": rng.randint(1, 5)}),
                    "decoder": lambda seed=seed: ("decoder", seed),
                    "trace": lambda seed=seed: ("trace", {**seed, "grad": rng.random() < 0.5, "patch": rng.random() < 0.5}),
                    "loss": lambda seed=seed: ("loss", {**seed, "step": rng.random() < 0.5}),
                    "mode": lambda: ("mode", {"training": rng.random() < 0.6}),
                    "attach": lambda seed=seed: ("attach", seed),
                    "freeze": lambda: ("freeze", {"layer": rng.randrange(2), "frozen": rng.random() < 0.7}),
                    "load_bank": lambda seed=seed: ("load_bank", {**seed, "bank": rng.randrange(2), "name": rng.choice("ab")}),
                    "unload_bank": lambda: ("unload_bank", {"bank": rng.randrange(2), "name": rng.choice("ab")}),
                    "rows": lambda seed=seed: ("rows", {**seed, "bank": rng.randrange(2)}),
                    "cast": lambda: ("cast", {"dtype": rng.choice(["float64", "float64", "float32", "bfloat16"])}),
                }.get(call, lambda call=call: (call, {}))()
            )
        return {"model": rng.choice(list(SPECS))}, steps

    def start(self, setup: Mapping[str, Any]) -> ModelSession:
        return ModelSession(setup["model"])


class ModelSession(Session):
    """A model, and all that a fresh one is made of: weights, adapter, frozen weights, format, mode."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, copy.deepcopy(_first(name))
        self.quantized, self.training, self.adapter = False, self.model.training, None
        self.merged: tuple[MergedWeights, dict[str, Tensor], dict[str, Tensor]] | None = None
        self.frozen, self.banks = set[str](), (Bank(self.model), Bank(self.model))
        self.loaded: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self.weights = self._weights(self.model)

    def fresh(self, adapter: Mapping[str, Tensor] | None = None) -> Any:
        """A new object with the same weights, in evaluation mode."""
        one = copy.deepcopy(_first(self.name)).to(self.dtype)
        with torch.no_grad():
            for path, weight in one.named_parameters():
                weight.copy_(self.weights[path])
        if self.quantized:
            dt.quantize(one, format="int8", speed=False)
        adapter = self.adapter if adapter is None else adapter
        if adapter is not None:
            attach(one, KIND)
            set_adapter(one, {path: tensor.to(self.dtype) for path, tensor in adapter.items()})
        return one.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def busy(self) -> bool:
        """Whether some bank has adapters: the model by itself is then refused."""
        return any(self.loaded)

    def close(self, got: Tensor, expected: Tensor, what: str) -> None:
        scale = max(1.0, expected.abs().max().item())
        if got.shape != expected.shape or (apart := (got - expected).abs().max().item()) > CLOSE[self.dtype] * scale:
            wrong(f"{what}: differs from a fresh object's by {apart if got.shape == expected.shape else 'its shape'}")  # type: ignore[possibly-undefined]

    def _weights(self, model: Any) -> dict[str, Tensor]:
        return {path: weight.detach().clone() for path, weight in model.named_parameters() if ".adapter." not in path}

    def do(self, call: str, **arguments: Any) -> None:
        super().do(call, **arguments)
        if self.model.training != self.training:
            wrong(f"{call} left the model in {'training' if self.model.training else 'evaluation'} mode")
        for path, weight in self.model.named_parameters():
            if ".adapter." in path:
                continue
            if weight.is_inference():
                wrong(f"{call} made {path} an inference tensor")
            if weight.requires_grad != (self.adapter is None and path not in self.frozen):
                wrong(f"{call}: {path} has requires_grad {weight.requires_grad}")

    def _refused(self, call: Any) -> None:
        try:
            call()
        except DovetailError:
            return
        wrong("a call that loses adapters was not refused")

    # -- what a model computes

    def do_logits(self, seed: int) -> None:
        if self.busy:
            return
        ids = ids_of(seed)
        self.model.eval()
        with torch.no_grad():
            self.close(self.model(ids), self.fresh()(ids), "logits")
        self.model.train(self.training)

    def do_generate(self, seed: int, max_tokens: int) -> None:
        if self.busy or self.dtype == torch.bfloat16:
            return
        prompt = ids_of(seed)[0]
        got, expected = self.model.generate(prompt, max_tokens), self.fresh().generate(prompt, max_tokens)
        if got != expected:
            wrong(f"generate: {got}, a fresh object {expected}")

    def do_decoder(self, seed: int) -> None:
        """What `generate(compiled=True)` does before it compiles: torch's compiler would take a minute per program."""
        if self.busy:
            return
        ids, fresh = ids_of(seed), self.fresh()
        with torch.inference_mode():
            decoder = Decoder(self.model, Pool(self.model.part, len(ids), 16, dtype=self.dtype), compiled=True)
            self.close(decoder.step(ids, range(len(ids))), fresh(ids)[:, -1], "decoder")

    def do_trace(self, seed: int, grad: bool, patch: bool) -> None:
        if self.busy:
            return
        ids, names = ids_of(seed), ("head.logits", "layers.1.mixer.pattern")
        patches = {"layers.0.mixer_add": 0.0} if patch else None
        self.model.eval()
        got, expected = (one.trace(ids, *names, grad=grad, patch=patches) for one in (self.model, self.fresh()))
        self.model.train(self.training)
        for name in names:
            self.close(got[name], expected[name], f"trace of {name}")
        if grad and got["head.logits"].requires_grad:
            for one in (got, expected):
                one["head.logits"].float().square().sum().backward()
            self.close(got[names[1]].grad, expected[names[1]].grad, "gradient at a tap")  # type: ignore[arg-type]
            self.model.zero_grad()

    def do_loss(self, seed: int, step: bool) -> None:
        """A step of gradient descent; dropout is drawn from the same seed."""
        if self.busy or (self.quantized and self.adapter is None):
            return
        ids, fresh = ids_of(seed), self.fresh()
        for path, weight in fresh.named_parameters():
            weight.requires_grad_(weight.requires_grad and path not in self.frozen)
        fresh.train(self.training)
        for one in (self.model, fresh):
            one.zero_grad()
            torch.manual_seed(seed)
            one.loss(ids).backward()
        known = dict(fresh.named_parameters())
        for path, weight in self.model.named_parameters():
            if (weight.grad is None) != (known[path].grad is None):
                wrong(f"loss: {path} has {'no' if weight.grad is None else 'a'} gradient")
            if weight.grad is not None:
                self.close(weight.grad, known[path].grad, f"gradient of {path}")
                if step:
                    with torch.no_grad():
                        weight -= 0.01 * weight.grad
        self.model.zero_grad()
        if step and self.adapter is not None:
            self.adapter = {path: tensor.detach().clone() for path, tensor in adapter_tensors(self.model).items()}
        elif step:
            self.weights = self._weights(self.model)
            self.merged = None

    def do_mode(self, training: bool) -> None:
        self.training = training
        self.model.train(training)

    def do_freeze(self, layer: int, frozen: bool) -> None:
        if self.adapter is not None or self.busy or self.merged is not None:
            return
        self.model.layers[layer].requires_grad_(not frozen)
        self.frozen = {path for path, weight in self.model.named_parameters() if not weight.requires_grad}

    # -- adapters

    def do_attach(self, seed: int) -> None:
        if self.adapter is not None or self.busy:
            self._refused(lambda: attach(self.model, KIND))
            return
        attach(self.model, KIND)
        self.adapter = {path: tensor.to(self.dtype) for path, tensor in adapter_of(self.name, seed).items()}
        set_adapter(self.model, self.adapter)
        self.merged = None

    def do_detach(self) -> None:
        if self.busy:
            self._refused(lambda: detach(self.model))
            return
        detach(self.model)
        self.adapter = None

    def do_merge(self) -> None:
        if self.busy or self.quantized:
            if self.busy or self.adapter is not None:
                self._refused(lambda: merge(self.model))
            return
        fresh, before = self.fresh(), self.weights
        merge(fresh)
        undo = merge(self.model)
        self.merged = None if self.adapter is None else (undo, self.adapter, before)
        self.adapter, self.weights = None, self._weights(fresh)
        for path, weight in self._weights(self.model).items():
            self.close(weight, self.weights[path], f"merged {path}")

    def do_undo(self) -> None:
        if self.merged is None or self.busy or self.adapter is not None:
            return
        undo, self.adapter, self.weights = self.merged
        undo.undo()
        self.merged = None

    def do_load_bank(self, seed: int, bank: int, name: str) -> None:
        def load() -> None:
            self.banks[bank].load(name, KIND, adapter_of(self.name, seed))

        if self.adapter is not None or self.loaded[1 - bank] or name in self.loaded[bank]:
            self._refused(load)
            return
        load()
        self.loaded[bank][name] = seed
        self.do_rows(seed, bank)

    def do_unload_bank(self, bank: int, name: str) -> None:
        if name in self.loaded[bank]:
            self.banks[bank].unload(name)
            del self.loaded[bank][name]

    def do_rows(self, seed: int, bank: int) -> None:
        """Each adapter of a bank computes what it does attached to a fresh object."""
        ids = ids_of(seed)
        self.model.eval()
        with torch.no_grad():
            for name, own in self.loaded[bank].items():
                with self.banks[bank].rows([name] * len(ids)):
                    self.close(self.model(ids), self.fresh(adapter_of(self.name, own))(ids), f"adapter {name}")
        self.model.train(self.training)

    # -- forms

    def do_quantize(self) -> None:
        if self.adapter is None and not self.busy and not self.quantized:
            dt.quantize(self.model, format="int8", speed=False)
            self.quantized, self.merged = True, None
            self.frozen &= {path for path, _ in self.model.named_parameters()}

    def do_save(self) -> None:
        """The model of a directory takes the place of the model."""
        if self.busy:
            return
        with tempfile.TemporaryDirectory() as place:
            if self.adapter is not None:
                self._refused(lambda: dt.save(self.model, Path(place) / "x"))
                return
            dt.save(self.model, Path(place) / "x")
            self.model = dt.load(Path(place) / "x").train(self.training)
        self.frozen, self.merged = set(), None
        self.banks, self.loaded = (Bank(self.model), Bank(self.model)), ({}, {})

    def do_cast(self, dtype: str) -> None:
        if self.busy or self.quantized:
            return
        self.model.to(getattr(torch, dtype))
        self.weights = {path: weight.to(self.dtype) for path, weight in self.weights.items()}
        self.adapter = None if self.adapter is None else {path: one.to(self.dtype) for path, one in self.adapter.items()}
        self.merged = None

    def end(self) -> None:
        self.do_logits(0)
        for bank in range(len(self.banks)):
            self.do_rows(0, bank)


def ids_of(seed: int) -> Tensor:
    """Token ids (2, 6)."""
    return torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed))
