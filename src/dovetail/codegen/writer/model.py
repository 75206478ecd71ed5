"""Blocks, and the model that holds them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.codegen.code import BODY, STEP, WIDTH, Call, File, fill, signature, wrapped
from dovetail.codegen.registry import (
    BlockCode,
    Context,
    EmbedCode,
    HeadCode,
    Join,
    MixerCode,
    ModelCode,
    PositionCode,
    WireCode,
    writes,
)

PERIOD = 8  # layers of the longest pattern that is detected

BLOCK = '''
class $name(nn.Module):
    """$doc"""

    $init
        super().__init__()
        $assignments

    $forward  # -> (B, N, D)
        $lines
        return $out
'''

MODEL = '''
class $name(nn.Module):
    """$doc"""

    def __init__(self):
        super().__init__()
        $assignments

    $forward
        $lines
'''

LAYER = """
def $name() -> $kind:
    $line
"""


def _body(lines: Sequence[str]) -> str:
    """Lines of a method, the first already indented."""
    return ("\n" + " " * BODY).join(lines)


def _assignment(name: str, call: Call) -> str:
    return wrapped(f"self.{name} = ", call, "", BODY)


@writes("block", "hybrid_block", "expert_block")
def block(context: Context) -> BlockCode:
    """The branches, the norms that the wire asks for, and the wire's lines."""
    part = context.part
    branches = {name: context.write(name) for name in part.branches()}
    calls = {name: code.call if isinstance(code, MixerCode) else code for name, code in branches.items()}
    arguments: dict[str, Mapping[str, str]] = {n: m.given if isinstance(m, MixerCode) else {} for n, m in branches.items()}
    join: Join = context.write("wire")
    factors = {name: part.multipliers().get(name, (1.0, 1.0)) for name in branches}
    ends = {name: ["" if factor == 1.0 else f" * {factor}" for factor in both] for name, both in factors.items()}
    steps = [
        {name: f"self.{name}({', '.join(['{}' + ends[name][0], *arguments[name]])}){ends[name][1]}" for name in step}
        for step in part.steps()
    ]
    wiring: WireCode = join(steps)
    norms = {name: context.write(name, part.norm) for name in part.norms()}

    def define(taken: Sequence[str]) -> Call:
        assignments = [_assignment("wire", wiring.scale)] if wiring.scale is not None else []
        assignments += [_assignment(name, norm) for name, norm in norms.items() if not name.startswith(tuple(branches))]
        for branch in branches:
            assignments += [_assignment(name, norm) for name, norm in norms.items() if name.startswith(branch)]
            assignments.append(f"self.{branch} = {branch}")
        if part.wire.dropout:
            assignments.append(f"self.dropout = nn.Dropout({part.wire.dropout})")
        text = fill(
            BLOCK,
            doc=wiring.doc,
            init=signature("__init__", [f"{name}: nn.Module" for name in branches]),
            assignments=_body(assignments),
            forward=signature("forward", ["x: Tensor", *(f"{name}: Tensor" for name in taken)], "Tensor"),
            lines=_body(wiring.lines),
            out=wiring.out,
        )
        inside = "Encoder" if context.scope.stack.startswith("encoder") else "Decoder"
        return Call.to(context.file.define("Block", text, f"{inside}Block"), **calls).opened()

    return BlockCode({name: made for given in arguments.values() for name, made in given.items()}, define)


@writes("model", ignores=("init",))
def model(context: Context) -> ModelCode:
    """Embedding, layers, norm, head; perhaps an encoder before them."""
    part, file = context.part, context.file
    file.letter(B="batch", N="tokens", D="width")
    outer = not context.scope.path
    encoder: ModelCode | None = None if part.encoder is None else context.write("encoder")
    entry: EmbedCode = context.write("embed")
    placed: PositionCode = context.write("position")
    norms: dict[str, Call] = {n: context.write(n) for n in ("embed_norm", "norm") if getattr(part, n) is not None}
    layers, given = _layers(context)
    for i, depth in enumerate(part.mtp):  # refused: no kind of multi-token prediction has a writer
        context.write(f"mtp.{i}", depth)
    answer: HeadCode = HeadCode(None, "return x", "(B, N, D)") if part.head is None else context.write("head")
    calls: dict[str, Call | None] = {"embed": entry.module, "position": placed.module, "embed_norm": norms.get("embed_norm")}
    lines = [_assignment(name, call) for name, call in calls.items() if call is not None]
    if part.dropout:
        lines.append(f"self.dropout = nn.Dropout({part.dropout})")
    if encoder is not None:
        lines.append(_assignment("encoder", encoder.call))
    lines.append(layers)
    lines += [
        _assignment(name, call) for name, call in (("norm", norms.get("norm")), ("head", answer.module)) if call is not None
    ]
    inputs = (*(("source: Tensor",) if encoder is not None else ()), *entry.inputs)
    text = fill(
        MODEL,
        doc=_doc(outer, encoder is not None, entry, answer),
        assignments=_body(lines),
        forward=signature("forward", inputs, "Tensor") + f"  # -> {answer.shape}",
        lines=_body(_forward(part, encoder, entry, placed, given, answer)),
    )
    examples = (*(encoder.examples if encoder is not None else ()), entry.example)
    return ModelCode(Call.to(file.define("Model" if outer else "Encoder", text)), inputs, examples, answer.shape)


def _doc(outer: bool, reads: bool, entry: EmbedCode, answer: HeadCode) -> str:
    """The inputs and outputs of the model."""
    name = entry.inputs[0].partition(":")[0]
    source = "source (B, M) and " if reads else ""
    shape = "(B, channels, height, width)" if name == "images" else "(B, N)"
    what = "The whole model" if outer else "The encoder"
    return f"{what}: {source}{name} {shape} to {answer.shape}."


def _forward(
    part: Any, encoder: ModelCode | None, entry: EmbedCode, placed: PositionCode, given: Mapping[str, str], answer: HeadCode
) -> list[str]:
    """The lines of a model's forward."""
    lines: list[str] = []
    if encoder is not None:
        table = ", self.embed.table" if "table: Tensor" in encoder.inputs else ""
        lines.append(f"encoder_output = self.encoder(source{table})  # (B, M, D)")
    lines.append(f"x = {entry.apply}  # (B, N, D)")
    if placed.stream:
        lines.append(f"x = {placed.stream}")
    if part.embed_norm is not None:
        lines.append("x = self.embed_norm(x)")
    if part.dropout:
        lines.append("x = self.dropout(x)")
    lines += [f"{name} = {made}  # one table for all layers" for name, made in given.items() if name != made]
    shared = any(block.shares is not None for block in part.layers)
    head, block = ("for i in self.uses:", "self.layers[i]") if shared else ("for block in self.layers:", "block")
    lines += [head, f"    x = {block}({', '.join(['x', *given])})"]
    if part.norm is not None:
        lines.append("x = self.norm(x)")
    return [*lines, *answer.lines.split("\n")]


# -- layers -----------------------------------------------------------------------------------------------------------


def _layers(context: Context) -> tuple[str, Mapping[str, str]]:
    """The lines that construct all layers, and their arguments besides x."""
    blocks: list[BlockCode] = [context.write(f"layers.{i}", block) for i, block in enumerate(context.part.layers)]
    given = {name: made for block in blocks for name, made in block.given.items()}
    calls = [block.define(list(given)) for block in blocks]
    if all(call == calls[0] for call in calls):
        inner, outer = " " * (BODY + STEP), " " * BODY
        layer = wrapped("", calls[0], "", BODY + STEP)
        made = [f"self.layers = nn.ModuleList(\n{inner}{layer}\n{inner}for _ in range({len(calls)})\n{outer})"]
    else:
        names = _functions(context.file, calls)
        made = [*_order([names[call] for call in calls]), "self.layers = nn.ModuleList(make() for make in kinds)"]
    return _body([*made, *_shared(context, calls)]), given


def _shared(context: Context, calls: Sequence[Call]) -> Iterator[str]:
    """Lines that name the layer which each one uses, where some use the weights of another."""
    owners = {i: block.shares for i, block in enumerate(context.part.layers) if block.shares is not None}
    for i, owner in owners.items():
        if calls[i] != calls[owner]:
            context.refuse(f"layers.{i}.shares", f"it is not like layer {owner}, so one module cannot be both")
    if owners:
        yield _listed("self.uses", [str(owners.get(i, i)) for i in range(len(calls))])
        yield "for i, used in enumerate(self.uses):  # some layers have no weights of their own"
        yield "    self.layers[i] = self.layers[i] if i == used else nn.Identity()"


def _functions(file: File, calls: Sequence[Call]) -> dict[Call, str]:
    """A function for every distinct block, named by what distinguishes it: mixer, mask or ffn."""
    distinct = list(dict.fromkeys(calls))
    if len(distinct) == 2 and calls.count(distinct[0]) == 1:
        names = [f"{when}_{_snake(call.name)}" for when, call in zip(("first", "later"), distinct, strict=True)]
    else:
        tells = [[words(call) for call in distinct] for words in (_by_mixer, _by_mask, _by_ffn)]
        names = next((words for words in tells if len(set(words)) == len(distinct)), tells[0])
    texts = [fill(LAYER, kind=call.name, line=wrapped("return ", call, "", STEP)) for call in distinct]
    return {call: file.define(name, text) for call, name, text in zip(distinct, names, texts, strict=True)}


def _by_mixer(call: Call) -> str:
    """The name of its first branch: the mixer's, where it has one."""
    return f"{_snake(call.args[0][1].name)}_block"


def _by_mask(call: Call) -> str:
    mixer = dict(call.args).get("mixer")
    mask = None if mixer is None else dict(mixer.args).get("mask")
    return _by_mixer(call) if mask is None else f"{mask.removesuffix('_mask')}_block"


def _by_ffn(call: Call) -> str:
    branches = dict(call.args)
    if not {"mixer", "ffn"} <= branches.keys():
        return _by_mixer(call)
    return f"{_by_mixer(call).removesuffix('_block')}_{_snake(branches['ffn'].name)}_block"


def _snake(name: str) -> str:
    """`GatedDelta` as `gated_deltanet`, `MLP` as `mlp`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _order(names: Sequence[str]) -> list[str]:
    """Lines that assign `kinds`, the kinds of the layers in order, written as a repeated pattern where there is one."""
    for period in range(1, PERIOD + 1):
        if period < len(names) and all(name == names[i % period] for i, name in enumerate(names)):
            times, rest = -(-len(names) // period), len(names) % period
            again = f"(pattern * {times})[:{len(names)}]" if rest else f"pattern * {times}"
            return [_listed("pattern", names[:period]), f"kinds = {again}"]
    return [_listed("kinds", names)]


def _listed(name: str, names: Sequence[str]) -> str:
    """`name = […]`, runs of equal names written shortly, within the width."""
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(names)]
    short = " + ".join(f"[{kind}] * {count}" if count > 1 else f"[{kind}]" for kind, count in runs)
    for text in (f"{name} = [{', '.join(names)}]", f"{name} = {short}"):
        if BODY + len(text) <= WIDTH:
            return text
    inner = "\n".join(f"{' ' * (BODY + STEP)}{kind}," for kind in names)
    return f"{name} = [\n{inner}\n{' ' * BODY}]"
