"""A tiny random model of transformers and ours with the same weights; what is compared between them."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.resolved import explicit
from dovetail.hf.tensors import count_ahead
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.state.pool import Pool


class Pair:
    """Theirs and ours, with equal weights that are far from any initialization."""

    def __init__(self, family: str, fields: dict[str, Any], seed: int, auto: Any = AutoModelForCausalLM) -> None:
        """`auto` is their class that finds the form asked for."""
        config = AutoConfig.for_model(family, **fields)
        self.family, self.seed, self.random = family, seed, random.Random(seed)
        config._experts_implementation = "eager"  # their grouped kernel takes no row that is not a multiple of 16 bytes
        torch.manual_seed(seed)  # some of their initial values are random
        self.theirs: Any = auto.from_config(config).eval()
        generator = torch.Generator().manual_seed(seed)
        kept = self.theirs.state_dict().keys()  # buffers that files hold count too
        with torch.no_grad():
            for name, tensor in (*self.theirs.named_parameters(), *self.theirs.named_buffers()):
                if name not in kept:
                    continue
                drawn = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor + 0.3 * drawn if tensor.dim() == 1 else 0.25 * drawn)  # scales: near 1, or 0
        described = {**config.to_dict(), "architectures": [type(self.theirs).__name__]}
        self.config = count_ahead(described, DIALECTS[family], kept)  # their models run no multi-token prediction
        self.spec: Model = from_hf(self.config)
        self.ours: ModelModule = build(self.spec)
        self.files = saved(self.theirs)
        self.load(import_tensors(self.spec, self.files, family))

    def load(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for path, tensor in tensors.items():
                tensor_at(self.ours, path).copy_(tensor)

    @property
    def vocab(self) -> int:
        return self.spec.vocab

    def biased_convolution(self) -> bool:
        """Whether what their convolution sees has a bias: then padding counts there, as it must not."""
        return any(name.endswith("in_proj.bias") for name in self.files)

    def decodes_one_row(self) -> bool:
        """Whether their decoding takes one row only: Falcon-H1's gated norm drops the dimension of a single token."""
        return bool(self.config.get("mamba_rms_norm"))

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [[self.random.randrange(self.vocab) for _ in range(n)] for n in lengths]


def saved(model: Any) -> dict[str, Tensor]:
    """The tensors of a model as its files hold them, which is not always how it holds them itself."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return {name: t for file in Path(place).glob("*.safetensors") for name, t in load_file(file).items()}


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and positions of rows padded on the left, as generate() makes them."""
    n = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), n, dtype=torch.long), torch.zeros(len(rows), n, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, n - len(row) :], mask[i, n - len(row) :] = torch.tensor(row), 1
    return tokens, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def apart(got: Tensor, wanted: Tensor) -> float:
    """The greatest difference, relative to the greatest number wanted."""
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()


def check_logits(pair: Pair, lengths: list[int]) -> None:
    rows = pair.prompts(lengths)
    tokens, mask, positions = left_padded(rows)
    with torch.no_grad():
        theirs = pair.theirs(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        ours = pair.ours(tokens, Ctx(layout=TokenLayout.padded(lengths, tokens.shape[1], left=True)))
    real = mask.bool()
    assert apart(ours[real], theirs[real]) <= 1e-5


def check_gradients(pair: Pair, n: int) -> None:
    tokens = torch.tensor(pair.prompts([n, n]))
    weight = torch.randn(2, n, pair.vocab, generator=torch.Generator().manual_seed(pair.seed + 1))
    pair.theirs.zero_grad(set_to_none=True)
    pair.ours.zero_grad(set_to_none=True)
    (pair.theirs(input_ids=tokens).logits * weight).sum().backward()
    (pair.ours(tokens, Ctx(layout=TokenLayout.whole(2, n))) * weight).sum().backward()
    for p in pair.theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad  # gradients take the road of the weights
    wanted = import_tensors(pair.spec, saved(pair.theirs), pair.family)
    learned = dict(pair.ours.named_parameters())
    wanted = {path: grad for path, grad in wanted.items() if path in learned}
    largest = max(grad.abs().max().item() for grad in wanted.values())
    for path, grad in wanted.items():
        got = learned[path].grad
        assert got is not None, path
        if grad.abs().max() < 1e-6 * largest:  # zero in theory (a k-bias without rotation): rounding alone
            assert got.abs().max() < 1e-6 * largest, path
        else:  # a small gradient is a sum of larger ones, and has their rounding
            assert (got - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7 * largest, path


def check_greedy(pair: Pair, lengths: list[int], new: int = 32) -> None:
    rows = pair.prompts(lengths)
    tokens, mask, _ = left_padded(rows)
    pair.theirs.generation_config.eos_token_id = None
    pair.theirs.generation_config.pad_token_id = 0
    with torch.no_grad():
        made = pair.theirs.generate(tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        assert ours_greedy(pair, rows, new) == made[:, tokens.shape[1] :].tolist()


def ours_greedy(pair: Pair, rows: list[list[int]], new: int) -> list[list[int]]:
    """Token by token from a pool; the prompts are padded on the right, which must change nothing."""
    numbers = list(range(len(rows)))
    pool = Pool(pair.spec, rows=len(rows), capacity=max(map(len, rows)) + new)
    lengths = [len(row) for row in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    step = pool.step(numbers, lengths)
    logits = pair.ours(tokens, Ctx(layout=step.layout, views=step.views))
    last = logits[torch.arange(len(rows)), torch.tensor(lengths) - 1]
    made: list[list[int]] = [[] for _ in rows]
    for _ in range(new):
        chosen = last.argmax(-1)
        for row, token in zip(made, chosen.tolist(), strict=True):
            row.append(token)
        step = pool.step(numbers, [1] * len(rows))
        last = pair.ours(chosen[:, None], Ctx(layout=step.layout, views=step.views))[:, -1]
    return made


def check_there_and_back(pair: Pair) -> None:
    """Bit-equal per tensor; the config too says the same again."""
    wanted, family = pair.files, pair.family
    got = export_tensors(pair.spec, import_tensors(pair.spec, wanted, family), family)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert tensor.equal(wanted[name]), name
    ported = to_hf(pair.spec, family)
    assert explicit(from_hf(ported.config)) == explicit(pair.spec)
    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.for_model(ported.config["model_type"], **_arguments(ported.config)))
    with tempfile.TemporaryDirectory() as place:
        save_file(got, Path(place) / "model.safetensors", metadata={"format": "pt"})
        rebuilt.config.save_pretrained(place)
        rebuilt = type(rebuilt).from_pretrained(place, experts_implementation="eager")
    tokens = torch.tensor(pair.prompts([7]))
    with torch.no_grad():
        assert rebuilt.eval()(input_ids=tokens).logits.equal(pair.theirs(input_ids=tokens).logits)


def _arguments(config: dict[str, Any]) -> dict[str, Any]:
    tokens = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}  # theirs may lie beyond a tiny vocabulary
    return {**tokens, **{name: value for name, value in config.items() if name != "model_type"}}
