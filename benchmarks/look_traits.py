"""Traits: of models with a planted trait, how many are found, and how many models without one have a false alarm?

    python benchmarks/look_traits.py [--json] [--quick]

24 models with a trait, two of most kinds, and 24 without. A planted head is written by hand into a model of random weights:
attention with large queries and keys, token and position in channels of their own, three layers of four heads, experts in one.
The layer and the head depend on the seed. Of the models without a trait, half have the same construction, half are random ones
of other kinds: RoPE, grouped heads, windows, LayerNorm, a recurrent mixer. A trait is found if a finding has its name and its
address. A model without one has a false alarm if it has any finding, of any name.

The thresholds (`dovetail.look.judging`) are those of papers, or were set on seeds from 1,000 on; the figure has seeds 0 to 23.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from measure import Goal, Row, arguments, progress, report
from torch import Generator, Tensor

from dovetail.files.spec import from_yaml
from dovetail.look.findings import Findings, traits
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.proof.laws.case import perturbed

SPEC = from_yaml("""
width: 128
vocab: 60
position: {kind: learned, length: 48}
layers:
- {mixer: {heads: 4, head: 48, position: none}, ffn: {hidden: 64}}
- mixer: {heads: 4, head: 48, position: none}
  ffn: {kind: moe, experts: 6, hidden: 32, router: {kind: softmax_router, top_k: 2}}
- {mixer: {heads: 4, head: 48, position: none}, ffn: {hidden: 64}}
head: {kind: lm, tied: true}
""")
OTHERS = [
    "- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}\n"
    "- {mixer: {heads: 4, head: 10, mask: [causal, {kind: window, size: 9}]}}",
    "- {repeat: 2, pattern: [a], a: {norm: layernorm, mixer: {heads: 4, head: 10, bias: true}, ffn: {kind: mlp, act: gelu}}}",
    "- {mixer: {kind: mamba2, inner: 60, head: 6, state_size: 5}, ffn: {hidden: 44}}\n- {mixer: {heads: 2}, ffn: {hidden: 44}}",
]
TOKEN, BEFORE, POSITION, FIRST, CONSTANT = slice(0, 48), slice(48, 96), slice(96, 126), 126, 127  # channels
ROWS, LENGTH, COUNT, LATER = 8, 48, 24, 1000


class Planted(NamedTuple):
    """A model, and the name and the address of its trait."""

    model: ModelModule
    name: str
    address: str


def base(seed: int) -> ModelModule:
    """Random heads, in a residual stream whose channels hold the token and the position."""
    gen, model = Generator().manual_seed(seed), build(SPEC, seed=seed)
    sharp = 0.06 + 0.06 * float(torch.rand((), generator=gen))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("scale",)):
                continue
            small = name.endswith(("o.weight", "down.weight", "bank.down"))
            weight.copy_(torch.randn(weight.shape, generator=gen) * (0.002 if small else sharp))
        table, position = model.get_parameter("embed.table"), model.get_parameter("position.table")
        table.zero_()[:, TOKEN] = torch.randn(60, 48, generator=gen) / math.sqrt(48)
        table[:, CONSTANT] = 0.3
        position.zero_()[0, FIRST] = 0.3
        speed = math.pi * torch.rand(15, generator=gen)
        angle = torch.arange(48)[:, None] * speed
        position[:, POSITION] = torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(15)
    model.speed = speed  # type: ignore[assignment]
    return model.eval()


def weights(model: ModelModule, layer: int, head: int) -> dict[str, Tensor]:
    """Views of a head: q, k, v (48, embed) and o (embed, 48)."""
    rows = slice(48 * head, 48 * head + 48)
    paths = {name: model.get_parameter(f"layers.{layer}.mixer.{name}.weight") for name in "qkvo"}
    return {name: weight.data[:, rows] if name == "o" else weight.data[rows] for name, weight in paths.items()}


def offset(by: int) -> Callable[[ModelModule, int, int], None]:
    """A head that attends to the token `by` positions back."""

    def plant(model: ModelModule, layer: int, head: int) -> None:
        head_of, turn = weights(model, layer, head), by * model.speed  # type: ignore[operator]
        head_of["q"].zero_()
        head_of["k"].zero_()
        cos, sin = torch.diag(turn.cos()), torch.diag(turn.sin())
        head_of["q"][:30, POSITION] = 2 * torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
        head_of["k"][:30, POSITION] = torch.eye(30)

    return plant


def matching(model: ModelModule, layer: int, head: int, keys: slice = TOKEN) -> None:
    """A head that attends to the token that is, or was before it, the query's."""
    head_of = weights(model, layer, head)
    head_of["q"].zero_()[:, TOKEN] = 2 * torch.eye(48)
    head_of["k"].zero_()[:, keys] = torch.eye(48)


def induction(model: ModelModule, layer: int, head: int) -> None:
    """A previous-token head that writes the token, and a head that reads it."""
    offset(1)(model, layer - 1, head)
    before = weights(model, layer - 1, head)
    before["v"].zero_()[:, TOKEN] = torch.eye(48)
    before["o"].zero_()[BEFORE] = torch.eye(48) / 7
    matching(model, layer, head, BEFORE)


def sink(model: ModelModule, layer: int, head: int) -> None:
    head_of = weights(model, layer, head)
    head_of["q"].zero_()[0, CONSTANT] = 6
    head_of["k"].zero_()[0, FIRST] = 6


def copying(model: ModelModule, layer: int, head: int) -> None:
    head_of = weights(model, layer, head)
    head_of["v"].zero_()[:, TOKEN] = torch.eye(48)
    head_of["o"].zero_()[TOKEN] = torch.eye(48) / 20


def sharp(model: ModelModule, layer: int, head: int) -> None:
    for name in "qk":
        weights(model, layer, head)[name].mul_(6)


def collapsed(model: ModelModule, layer: int, _: int) -> None:
    for head in range(4):
        sharp(model, layer, head)


def even(model: ModelModule, layer: int, head: int) -> None:
    weights(model, layer, head)["q"].zero_()


def massive(model: ModelModule, _: int, __: int) -> None:
    model.get_parameter("position.table").data[0, FIRST] = 40


def outlier(model: ModelModule, _: int, __: int) -> None:
    model.get_parameter("embed.table").data[:, CONSTANT] = 2


def same(model: ModelModule, _: int, head: int) -> None:
    table = model.get_parameter("embed.table").data
    table += torch.randn(128, generator=Generator().manual_seed(head)) * 20 / math.sqrt(128)


def dead_neurons(model: ModelModule, _: int, __: int) -> None:
    model.get_parameter("layers.0.ffn.gate.weight").data[3:8] = 0


def dead_expert(model: ModelModule, _: int, head: int) -> None:
    model.get_parameter("layers.1.ffn.router.out.weight").data[head, CONSTANT] = -20


PATTERN, STREAM = "layers.{layer}.mixer.pattern[head={head}]", "layers.{layer}.in[channel={channel}]"
PLANTS = {  # name of the trait -> how it is planted, and the address of the finding
    "previous-token": (offset(1), PATTERN),
    "positional": (offset(3), PATTERN),
    "induction": (induction, PATTERN),
    "duplicate-token": (matching, PATTERN),
    "first-token": (sink, PATTERN),
    "copying": (copying, "layers.{layer}.mixer.z[head={head}]"),
    "low-entropy": (sharp, PATTERN),
    "uniform": (even, PATTERN),
    "entropy-collapse": (collapsed, "layers.{layer}.mixer.pattern"),
    "massive-activation": (massive, f"[channel={FIRST}]"),
    "outlier-channel": (outlier, f"[channel={CONSTANT}]"),
    "rank-collapse": (same, "layers.0.in"),
    "dead-neurons": (dead_neurons, "layers.0.ffn.hidden[channel=3|4|5|6|7]"),
    "dead-experts": (dead_expert, "layers.1.ffn.router.logits[expert={head}]"),
}


def planted(seed: int) -> Planted:
    """The model of a seed with a trait; the kinds follow each other."""
    name = list(PLANTS)[seed % len(PLANTS)]
    gen = Generator().manual_seed(seed + 7)
    layer, head = 1 + int(torch.randint(2, (), generator=gen)), int(torch.randint(4, (), generator=gen))
    plant, address = PLANTS[name]
    model = base(seed)
    with torch.no_grad():
        plant(model, layer, head)
    return Planted(model, name, address.format(layer=layer, head=head))


def clean(seed: int) -> ModelModule:
    """The model of a seed without a trait."""
    if seed % 2 == 0:
        return base(seed + 500)
    return perturbed(from_yaml(f"width: 28\nvocab: 60\nlayers:\n{OTHERS[seed // 2 % len(OTHERS)]}"), seed)


def text(seed: int) -> Tensor:
    """A random text."""
    return torch.randint(60, (ROWS, LENGTH), generator=Generator().manual_seed(seed + 31))


def found(case: Planted, findings: Findings) -> bool:
    """Whether a finding is the planted trait."""
    return any(f.name == case.name and f.address.endswith(case.address) for f in findings)


def main() -> None:
    """Plant, look and count."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--first", type=int, default=0, help=f"the first seed; thresholds were set on those from {LATER}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = 3 if options.quick else COUNT
    seeds = range(options.first, options.first + count)
    hits = alarms = beside = 0
    with progress("models", 2 * count) as tick:
        for seed in seeds:
            case = planted(seed)
            findings = traits(case.model, text(seed))
            hits += found(case, findings)
            beside += sum(f.name != case.name for f in findings)
            if not options.json and not found(case, findings):
                print(f"missed: seed {seed}, {case.name} {case.address}\n{findings!r}")
            tick()
            findings = traits(clean(seed), text(seed))
            alarms += bool(findings)
            if not options.json and findings:
                print(f"false alarm: seed {seed}\n{findings!r}")
            tick()
    report(
        [
            Row(f"traits found, of {count} planted", hits, None if options.quick else Goal(low=23)),
            Row(f"false alarms, of {count} models without", alarms, None if options.quick else Goal(high=1)),
            Row("other findings in the models with a trait", beside),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
