"""Models of any form made by transformers, and ours with the same weights: encoders, encoder–decoders and images.

A question holds the same inputs in their words and in ours: rows of tokens padded on the right, images, sources and targets.
"""

from __future__ import annotations

import dataclasses as dc
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_pair import Pair, apart, saved
from safetensors.torch import save_file
from torch import Tensor

from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.resolved import explicit
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.state.pool import Pool

WORST: dict[str, float] = {}  # the greatest gaps seen, for the figures


def noted(what: str, gap: float) -> float:
    WORST[what] = max(WORST.get(what, 0.0), gap)
    return gap


class FormPair(Pair):
    """Theirs and ours of any form."""

    def __init__(self, family: str, auto: str, fields: dict[str, Any], seed: int) -> None:
        super().__init__(family, fields, seed, getattr(transformers, auto))

    def tokens(self, lengths: list[int]) -> Tensor:
        """Rows padded on the right; padding is whatever token they take for it, which is no other token of a row."""
        pad = self.config.get("pad_token_id") or 0
        rows = [[self.random.choice([t for t in range(self.spec.vocab) if t != pad]) for _ in range(n)] for n in lengths]
        return torch.tensor([row + [pad] * (max(lengths) - len(row)) for row in rows])

    def question(self, lengths: list[int]) -> Question:
        """Inputs of the kind this model takes."""
        if not self.spec.embed.causal():
            pixels = self.spec.embed.example(self.ours.scope, len(lengths), 0, torch.Generator().manual_seed(self.seed)).float()
            return Question({"pixel_values": pixels}, pixels, TokenLayout.whole(len(lengths), 1))
        tokens, layout = self.tokens(lengths), TokenLayout.padded(lengths, max(lengths))
        mask = layout.real.long()
        if self.spec.encoder is not None:
            target = self.tokens([max(lengths) + 3] * len(lengths))
            asked = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": target}
            return Question(asked, target, TokenLayout.whole(*target.shape), source=tokens, source_layout=layout)
        asked = {"input_ids": tokens, "attention_mask": mask}
        types = None
        if self.config.get("type_vocab_size"):
            types = torch.randint(
                self.config["type_vocab_size"], tokens.shape, generator=torch.Generator().manual_seed(self.seed)
            )
            asked["token_type_ids"] = types
        return Question(asked, tokens, layout, types=types)


@dc.dataclass
class Question:
    """The same inputs in their words and in ours."""

    theirs: dict[str, Tensor]
    inputs: Tensor
    layout: TokenLayout
    types: Tensor | None = None
    source: Tensor | None = None
    source_layout: TokenLayout | None = None

    def ask_ours(self, pair: FormPair, heard: dict[str, Tensor] | None = None) -> Tensor:
        """Our answer; what every layer is given goes into `heard` by its address."""
        listen = None if heard is None else Listener({"*layers.*.in": lambda address, x: heard.update({address: x})})
        if self.source is None:
            return pair.ours(self.inputs, Ctx(layout=self.layout, types=self.types, taps=listen))
        assert self.source_layout is not None
        encoder_output, encoder_layout = pair.ours.encode(self.source, Ctx(layout=self.source_layout, taps=listen))
        return pair.ours(
            self.inputs, Ctx(layout=self.layout, encoder_output=encoder_output, encoder_layout=encoder_layout, taps=listen)
        )

    def ask_theirs(self, pair: FormPair, hidden: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Their answer, and what every layer is given by our addresses."""
        out = pair.theirs(**self.theirs, **({"output_hidden_states": True} if hidden else {}))
        answer = out[to_hf(pair.spec, pair.family).form.answer]
        if not hidden:
            return answer, {}
        stacks = (
            {"encoder.": "encoder_hidden_states", "": "decoder_hidden_states"}
            if self.source is not None
            else {"": "hidden_states"}
        )
        return answer, {
            f"{stack}layers.{i}.in": out[name][i]
            for stack, name in stacks.items()
            for i in range(len(pair.spec.encoder.layers if stack else pair.spec.layers))  # type: ignore[union-attr]
        }

    def real(self, x: Tensor, address: str = "") -> Tensor:
        """The values of real tokens; a pooled answer as it is."""
        layout = self.source_layout if address.startswith("encoder") else self.layout
        assert layout is not None
        return x[layout.real] if x.shape[:2] == layout.order.shape else x


def check_answers(pair: FormPair, question: Question) -> None:
    """Their answer and ours, and what every layer is given."""
    heard: dict[str, Tensor] = {}
    with torch.no_grad():
        wanted, given = question.ask_theirs(pair, hidden=True)
        got = question.ask_ours(pair, heard)
    assert noted(f"{pair.family} answers", apart(question.real(got), question.real(wanted))) <= 1e-5
    assert given.keys() == heard.keys()
    for address, x in given.items():
        gap = apart(question.real(heard[address], address), question.real(x, address))
        assert noted(f"{pair.family} hidden", gap) <= 1e-5, address


def check_form_there_and_back(pair: FormPair, question: Question, unread: frozenset[str] = frozenset()) -> None:
    """Bit-equal per tensor, but for those that nobody reads; the config says the same again, and so does their model of it."""
    family, wanted = pair.family, {name: t for name, t in pair.files.items() if name not in unread}
    got = export_tensors(pair.spec, import_tensors(pair.spec, pair.files, family), family)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert tensor.equal(wanted[name]), name
    ported = to_hf(pair.spec, family)
    assert ported.form.architecture == type(pair.theirs).__name__
    assert explicit(from_hf(ported.config)) == explicit(pair.spec)
    tokens = {f"{name}_token_id": pair.config.get(f"{name}_token_id") for name in ("pad", "bos", "eos")}
    settings = {**tokens, **ported.config}
    settings.pop("model_type")
    with tempfile.TemporaryDirectory() as place:
        save_file(got, Path(place) / "model.safetensors", metadata={"format": "pt"})
        transformers.AutoConfig.for_model(family, **settings).save_pretrained(place)
        rebuilt = type(pair.theirs).from_pretrained(place).eval()
    with torch.no_grad():
        wanted_answer, _ = question.ask_theirs(pair)
        pair.theirs, theirs = rebuilt, pair.theirs
        answer, _ = question.ask_theirs(pair)
        pair.theirs = theirs
    state = rebuilt.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in pair.theirs.state_dict().items() if name not in unread)
    assert apart(answer, wanted_answer) <= 2e-6  # where numbers lie in memory decides the order of their sums


def check_form_gradients(pair: FormPair, question: Question) -> None:
    """The gradient of every weight, for a random weight of every number of the answer."""
    pair.theirs.zero_grad(set_to_none=True)
    pair.ours.zero_grad(set_to_none=True)
    wanted_answer, _ = question.ask_theirs(pair)
    weight = torch.randn(question.real(wanted_answer).shape, generator=torch.Generator().manual_seed(pair.seed + 1))
    (question.real(wanted_answer) * weight).sum().backward()
    (question.real(question.ask_ours(pair)) * weight).sum().backward()
    for p in pair.theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad  # gradients take the road of the weights
    learned = {name for name, _ in pair.theirs.named_parameters(remove_duplicate=False)}
    kept = {name for name in pair.theirs.state_dict() if name not in learned}  # buffers learn nothing there
    wanted = import_tensors(pair.spec, saved(pair.theirs), pair.family)
    unlearned = {path for move in to_hf(pair.spec, pair.family).moves for path in move.paths if kept & set(move.hf_names)}
    largest = max(grad.abs().max().item() for path, grad in wanted.items() if path not in unlearned)
    for path, grad in wanted.items():
        if path in unlearned:
            continue
        got = tensor_at(pair.ours, path).grad
        assert got is not None, path
        if grad.abs().max() < 1e-6 * largest:  # zero in theory (a k-bias without rotation): rounding alone
            assert got.abs().max() < 1e-6 * largest, path
        else:
            assert noted(f"{pair.family} gradients", apart(got, grad)) <= 1e-4, path


def check_greedy_from_sources(pair: FormPair, lengths: list[int], new: int = 64, left: bool = False) -> None:
    """As many tokens as asked for, greedily, of sources of different lengths, from a pool with the sources' keys; `left`: their
    sources are padded on the left, which a family of relative positions does not feel."""
    source, start = pair.tokens(lengths), 2
    n, mask = source.shape[1], TokenLayout.padded(lengths, source.shape[1]).real.long()
    shown, shown_mask = source, mask
    if left:
        turned = torch.tensor([[(j - (n - m)) % n for j in range(n)] for m in lengths])
        shown, shown_mask = source.gather(1, turned), mask.gather(1, turned)
    settings = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None}
    for name, value in settings.items():
        setattr(pair.theirs.generation_config, name, value)
    with torch.no_grad():
        made = pair.theirs.generate(
            shown,
            attention_mask=shown_mask,
            decoder_start_token_id=start,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            num_beams=1,
        )
        rows = list(range(len(lengths)))
        pool = Pool(pair.spec, rows=len(rows), capacity=new + 1, source=n)
        encoder_output, encoder_layout = pair.ours.encode(source, Ctx(layout=TokenLayout.padded(lengths, n)))
        pair.ours.fill(
            Ctx(layout=encoder_layout, encoder_output=encoder_output, encoder_layout=encoder_layout), pool.admit(rows, lengths)
        )
        chosen, ours = torch.full((len(rows),), start), []
        for _ in range(new):
            step = pool.step(rows, [1] * len(rows))
            chosen = pair.ours(chosen[:, None], Ctx(layout=step.layout, views=step.views))[:, -1].argmax(-1)
            ours.append(chosen)
    assert torch.stack(ours, 1).tolist() == made[:, 1:].tolist()
