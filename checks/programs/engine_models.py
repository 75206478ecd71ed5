"""Small models of the engine's programs, and the logits that a request must get, from a fresh object.

The models are in float64 with perturbed weights: a batch rounds as a row by itself does, up to 1e-12, and no two logits are as
near to each other as that.
"""

from __future__ import annotations

import copy
import dataclasses as dc
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

import dovetail as dt
from dovetail.decoding.generation import encode_source
from dovetail.decoding.steps import Decoder
from dovetail.model.model import ModelModule
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.nn.inputs import default_ctx
from dovetail.proof.laws.case import perturbed
from dovetail.state.pool import Pool
from dovetail.state.quantized import CacheFormat
from dovetail.text.grammar import Grammars
from dovetail.text.learn import learn
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.adapters.attach import attach, detach
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.multi_lora import Bank
from dovetail.weights.adapters.storage import adapter_tensors

START = (1,)  # the first decoder token of an encoder–decoder
TEXT = "the cat sat on the mat; 12 mice ate 3 cheeses. " * 4
VOCAB = 270

_FFN = "ffn: {hidden: 20}"
_ATTENTION = "heads: 2, kv_heads: 1, head: 6"
_MAMBA = f"{{mixer: {{kind: mamba2, inner: 24, head: 6, state_size: 4}}, {_FFN}}}"


def _of(*layers: str, more: str = "") -> str:
    return f"{{width: 12, vocab: {VOCAB}, {more}layers: [{', '.join(layers)}]}}"


def _attention(more: str = "") -> str:
    return f"{{mixer: {{{_ATTENTION}{more}}}, {_FFN}}}"


_PREFIX = ", mask: {any: [causal, {kind: prefix, length: 10}]}"
_ENCODER = f"encoder: {{width: 12, vocab: {VOCAB}, head: null, layers: [{_attention(', mask: full')}]}}, "
_CROSS = f"{{mixer: {{{_ATTENTION}}}, cross: {{kind: cross_attention, {_ATTENTION}}}, {_FFN}}}"


@dc.dataclass(frozen=True)
class Sort:
    """A sort of model: its spec, and what is known of it."""

    spec: str
    stepwise: bool = False  # its logits are those of the prompt at once, then token by token; else of one full pass
    drafts: bool = True  # takes drafts; else a drafter is refused
    refused: str = ""  # words of the error with which an engine refuses it
    least: int = 1  # tokens of a prompt
    own: bool = False  # has multi-token prediction
    weight: float = 1.0  # how often it is sampled


MODELS: Mapping[str, Sort] = {
    "attention": Sort(_of(_attention()), weight=3.0),
    "two layers": Sort(_of(_attention(), _attention(", mask: [causal, {kind: window, size: 5}]"))),
    "hybrid": Sort(_of(_MAMBA, _attention()), weight=2.0),
    "recurrent": Sort(_of(_MAMBA)),
    "window": Sort(_of(_attention(", mask: [causal, {kind: window, size: 4, keep: 1}]"))),
    "prefix or causal": Sort(_of(_attention(_PREFIX)), least=10),
    "prefix with recurrence": Sort(_of(_MAMBA, _attention(_PREFIX)), least=10, weight=1.5),
    "prefix": Sort(
        _of(_attention(), _attention(", mask: {kind: prefix, length: 6}")), least=6, refused="layers.1.mixer", weight=0.3
    ),
    "encoder–decoder": Sort(_of(_CROSS, more=_ENCODER), stepwise=True),
    "dynamic NTK": Sort(
        _of(_attention(", position: {kind: rope, scaling: {kind: dynamic_ntk, original: 8}}")),
        stepwise=True,
        drafts=False,
        weight=1.5,
    ),
    "longrope": Sort(
        _of(_attention(", position: {kind: rope, scaling: {kind: longrope, original: 8, long: [3.0]}}")),
        stepwise=True,
        drafts=False,
    ),
    "experts": Sort(_of(f"{{mixer: {{{_ATTENTION}}}, ffn: {{kind: moe, experts: 4, hidden: 12}}}}")),
    "multi-token prediction": Sort(_of(_attention(), more=f"mtp: [{{block: {_attention()}}}, medusa], "), own=True),
}
KINDS = {"low": Lora(rank=2), "high": Lora(rank=3, alpha=8.0)}


@cache
def tokenizer() -> Tokenizer:
    """A tokenizer of the vocabulary's size or less."""
    return learn(TEXT, VOCAB)


@cache
def grammars() -> Grammars:
    """Compiles the grammars of requests; the tokenizer has no end token."""
    return Grammars(tokenizer(), VOCAB, [])


@cache
def original(name: str) -> ModelModule:
    """A model, which is not changed."""
    return perturbed(dt.from_yaml(MODELS[name].spec), 0).eval().requires_grad_(False)


def model_of(name: str) -> ModelModule:
    """A copy of a model, whose weights a program may change."""
    return copy.deepcopy(original(name))


_unused: dict[str, list[ModelModule]] = {}  # copies that a program gave back as they were


def borrow(name: str) -> ModelModule:
    """A copy of a model, maybe one that was used before: a copy takes as long as a dozen steps."""
    free = _unused.setdefault(name, [])
    return free.pop() if free else model_of(name)


def give_back(name: str, model: ModelModule) -> None:
    """Let another program use a copy, if its weights are those of the model; adapters are taken off."""
    if all(torch.equal(a, b) for a, b in zip(model.parameters(), original(name).parameters(), strict=True)):
        for _, leaf in list(adapted_leaves(model)):
            leaf.adapter = None
        _unused.setdefault(name, []).append(model.eval())


@cache
def adapter_of(model: str, kind: str, seed: int) -> dict[str, Tensor]:
    """The tensors of an adapter of a model."""
    bare = model_of(model)
    attach(bare, KINDS[kind])
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for path, tensor in adapter_tensors(bare).items():
        made[path] = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.4
    detach(bare)
    return made


@torch.no_grad()
def change_weights(model: ModelModule, seed: int) -> None:
    """Write to every weight in place."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


@torch.inference_mode()
def logits_of(
    name: str,
    model: ModelModule,
    prompt: Sequence[int],
    tokens: Sequence[int],
    adapter: tuple[str, int] | None,
    cache: CacheFormat | None,
) -> Tensor:
    """Logits (n, vocab) in float32 that precede each token: of an encoder–decoder each of `tokens`, else each but the first of
    the prompt and tokens. `model` is not the engine's; `adapter`: the kind and seed."""
    if adapter is None:
        return _logits(name, model, prompt, tokens, cache)
    bank = Bank(model)
    bank.load("one", KINDS[adapter[0]], adapter_of(name, *adapter))
    try:
        with bank.rows(["one"]):
            return _logits(name, model, prompt, tokens, cache)
    finally:
        bank.unload("one")


def _logits(name: str, model: ModelModule, prompt: Sequence[int], tokens: Sequence[int], cache: CacheFormat | None) -> Tensor:
    if not MODELS[name].stepwise and cache is None:
        ids = torch.tensor([[*prompt, *tokens]])
        return model(ids, default_ctx(ids))[0, :-1].float()
    encoder = model.part.encoder is not None
    pool = Pool(model.part, 1, len(prompt) + len(tokens) + 1, dtype=model.dtype, source=len(prompt), cache=cache)
    if encoder:
        encode_source(model, pool, torch.tensor(prompt))
    decoder, rows = Decoder(model, pool), list[Tensor]()
    for inputs in (START if encoder else prompt, *([token] for token in tokens[:-1])):
        rows.append(decoder.step(torch.tensor([list(inputs)]), [0])[0].float())
    if encoder:
        return torch.stack(rows)
    unknown = torch.full((len(prompt) - 1, rows[0].shape[-1]), float("nan"))
    return torch.cat([unknown, torch.stack(rows)])
