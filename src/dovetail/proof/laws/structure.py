"""Laws of declarations: declared = real (1), round trip (2), tapped (10), every field counts (15)."""

from __future__ import annotations

import contextlib
import dataclasses as dc
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes, save as save_bytes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dovetail.account import Account, mtp_flops
from dovetail.base.errors import DovetailError, StateError
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.hf.load import load
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.block import BlockModule
from dovetail.nn.ctx import Ctx, Listener, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.groups import Mask, PositionModule, Scaling
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.ops import attend
from dovetail.proof.laws.case import BATCH, DTYPE, IDENTITY, Case, N, NotApplicable, law
from dovetail.proof.laws.kernel import loss_of
from dovetail.spec.check import check
from dovetail.spec.fold import attention_flops, declared, matmul_flops, parameters, state_values, states, taps
from dovetail.spec.part import KINDS, join, walk, walk_spec
from dovetail.state.frame import SourceView
from dovetail.state.pool import Pool

LATER_LAYER = re.compile(r"layers\.[1-9]")


@law(1, "declared", "declared weights, counts, matmul FLOPs and state bytes equal the measured ones")
def declared_is_real(case: Case) -> None:
    """Compare names, shapes and counts; then FLOPs of the reference implementation; then the bytes of a pool."""
    spec = case.spec
    want = {d.path: d.weight.shape(d.scope) for d in declared(spec) if not d.weight.buffer}
    real = {name: tuple(p.shape) for name, p in case.model.named_parameters(remove_duplicate=False)}
    case.true(want == real, f"declared and real parameters differ: {set(want.items()) ^ set(real.items())}")
    count = sum(p.numel() for p in case.model.parameters())
    case.true(parameters(spec) == count, f"{parameters(spec)} parameters declared, {count} in the model")
    _flops(case)
    if spec.order() != "both":
        real = sum(Pool(spec, 1, N, dtype=DTYPE, source=N, drafts=drafts).bytes() for drafts in (False, True))
        whole = state_values(_unbounded(spec), N) * DTYPE.itemsize
        case.true(real == whole, f"{whole} bytes of state declared, {real} allocated")
        # some states stay in float32
        narrow = sum(Pool(spec, 1, N, dtype=torch.bfloat16, source=N, drafts=drafts).bytes() for drafts in (False, True))
        forecast = Account(_unbounded(spec), N, "bf16").state_bytes(N)
        case.true(forecast == narrow, f"{forecast} bytes of state forecast in bfloat16, {narrow} allocated")
        written = _decode_state(case).values()
        case.true(all(bool((store[:-1] != 0).all()) for store in written), "a declared state is never written to")
        if spec.encoder is None and all(state.window is not None for _, state, _ in states(spec)):
            rings = [Pool(spec, 1, N, layout="ring", dtype=DTYPE, slack=0, drafts=drafts).bytes() for drafts in (False, True)]
            bounded = state_values(spec, 10 * N) * DTYPE.itemsize
            case.true(sum(rings) == bounded, f"{bounded} bytes of bounded state declared, {sum(rings)} in rings")


def _unbounded(spec: Model) -> Model:
    """The same spec with causal masks, whose KV cache has no window, as a contiguous pool allocates it."""
    return spec.swap("mask", KINDS["causal"]()) if spec.order() != "both" else spec


@torch.no_grad()
def _flops(case: Case) -> None:
    """Compare FLOPs of the layers only: a head that pools and an embedding that adds tokens process other numbers of tokens."""
    bare = dc.replace(case.spec, head=None)
    tokens = (
        case.run(layout=None).shape[1] if case.spec.head is None else case.model.hidden(case.inputs, case.ctx())[0].shape[1]
    )
    with attend.using("reference"), FlopCounterMode(display=False) as counter:
        case.model.hidden(case.inputs, case.ctx())
    # the counter names the outermost modules by their classes
    kinds = {type(module).__name__ for module in case.model.modules() if isinstance(module, BlockModule)}
    measured = sum(sum(counter.get_flop_counts()[kind].values()) for kind in kinds)
    per_token = matmul_flops(bare) - matmul_flops_outside(bare)
    if bare.encoder is not None:
        per_token += matmul_flops(bare.encoder) - matmul_flops_outside(bare.encoder)
    want = BATCH * (per_token * tokens + attention_flops(bare, tokens)[0])
    case.true(measured == want, f"{want} FLOPs declared, {measured} measured")
    if case.spec.mtp:
        with attend.using("reference"), FlopCounterMode(display=False) as both:
            case.model.hidden(case.inputs, case.ctx(losses=Losses()))
        extra, want = both.get_total_flops() - counter.get_total_flops(), BATCH * mtp_flops(case.spec, tokens)[0]
        case.true(extra == want, f"{want} FLOPs of multi-token prediction declared, {extra} measured")


def matmul_flops_outside(spec: Model) -> int:
    """Matmul FLOPs per token outside the layers of this stack."""
    outside = (d for d in declared(spec) if d.weight.matmul and not d.scope.drafts and not d.path.startswith("layers."))
    return int(sum(2 * d.size * d.weight.used for d in outside))


@law(2, "round_trip", "spec ↔ yaml ↔ spec; weights and model directories save and load bit for bit")
def round_trip(case: Case) -> None:
    """Round-trip the spec through YAML, the stored tensors through bytes, and the model through a model directory."""
    text = to_yaml(case.spec)
    back = from_yaml(text)
    case.true(back == case.spec, f"the spec read back from YAML differs:\n{text}")
    case.true(to_yaml(back) == text, "the YAML of the spec read back differs")
    stored = {d.path: tensor_at(case.model, d.path).detach() for d in declared(case.spec) if d.weight.stored}
    fresh = build(case.spec, dtype=DTYPE, seed=case.seed + 1)
    with torch.no_grad():
        for path, value in load_bytes(save_bytes({k: v.contiguous() for k, v in stored.items()})).items():
            tensor_at(fresh, path).copy_(value)
        got = case.of(fresh).run()
        case.same(got, case.run(), "outputs with loaded weights", IDENTITY)
    with tempfile.TemporaryDirectory() as place:
        save(case.model, case.spec, Path(place) / "model")
        loaded = load(Path(place) / "model")
    case.true(loaded.part == case.spec, "the spec of a model directory differs")
    tensors = loaded.state_dict()
    case.true(tensors.keys() == case.model.state_dict().keys(), "the tensors of a model directory differ")
    for name, value in case.model.state_dict().items():
        case.same(tensors[name], value, f"{name} of a model directory", IDENTITY)


@law(10, "tapped", "every tap fires once at its address; patching a tap with itself changes nothing")
@torch.no_grad()
def tapped(case: Case) -> None:
    """Read every tap, which changes no bit; replace its value by a copy, and compare; then check that the residual stream is
    the sum of the branches."""
    fired: Counter[str] = Counter()
    values: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> Tensor:
        fired[address] += 1
        values[address] = x
        return x.clone()

    with attend.using("reference"):
        want = case.run()
        read = case.run(taps=Listener({"*": lambda *_: None}))
        got = case.run(taps=Listener({"*": listen}))
    case.same(read, want, "reading every tap", IDENTITY)
    case.same(got, want, "patching every tap with itself")
    head = [] if case.spec.head is None else taps(case.spec)
    expected = {*(head or taps(case.spec))}
    case.true(set(fired) == expected, f"taps that fired and declared ones differ: {sorted(set(fired) ^ expected)[:6]}")
    case.true(set(fired.values()) <= {1}, f"fired more than once: {[a for a, n in fired.items() if n > 1][:4]}")
    for i, block in enumerate(case.spec.layers):
        stream = values[f"layers.{i}.in"]
        for step in block.steps() if block.wire.sums else ():
            for name in step:
                stream = stream + values[f"layers.{i}.{name}_add"]
            after = values[f"layers.{i}.after_{step[0]}"]
            case.same(after, stream, f"layers.{i}: the residual stream after {step[0]} and the sum of its branches")
        _pattern_rows(case, values, f"layers.{i}.mixer.pattern")
    _tapped_elsewhere(case, values)


def _tapped_elsewhere(case: Case, want: dict[str, Tensor]) -> None:
    """Compare the values at the same addresses: with the kernel that runs without a listener on patterns, and while
    decoding from a pool."""
    values: dict[str, Tensor] = {}

    listener = Unedited({"*": values.__setitem__})
    case.run(taps=listener)
    shared = [address for address in want if address in values and want[address].is_floating_point()]
    case.true(len(shared) > 0, "no tap fires with the chosen kernel")
    for address in shared:
        case.same(values[address], want[address], f"{address} with the reference kernel and with the chosen one")
    if case.spec.order() == "causal" and case.spec.encoder is None:
        values.clear()
        pool = Pool(case.spec, BATCH, N, dtype=DTYPE)
        step = pool.step(range(BATCH), [N] * BATCH)
        case.stream(case.inputs, Ctx(layout=step.layout, views=step.views, patches=case.patches, taps=listener))
        for address in ("embedded", *(f"layers.{i}.after_{b.steps()[-1][0]}" for i, b in enumerate(case.spec.layers))):
            case.true(address in values, f"{address} does not fire while decoding")
            case.same(values[address], want[address], f"{address} while decoding and in a full forward pass")


class Unedited(Listener):
    """Listens to the taps that fire with a fused kernel, and does not ask for the others, so that any kernel may run."""

    def wants(self, address: str) -> bool:
        return False


def _pattern_rows(case: Case, values: dict[str, Tensor], address: str) -> None:
    if address in values:
        probs = values[address]
        sums_to_one = bool((probs.sum(-1) <= 1 + 1e-9).all()) and bool((probs >= 0).all())
        case.true(sums_to_one, f"{address}: probs are below 0 or sum to more than 1")


@law(
    15,
    "every_field",
    "changing any field changes the output, the loss, the initial weights, the cost, the state or the shape",
    covers="values",
    budget=2.0,
)
def every_field(case: Case) -> None:
    """Change each field of each part to another of its samples, and compare everything that a field could change. Where this
    changes nothing, the other values are tested, too: `kv_heads: null` is as many as `heads`."""
    tested, mine = 0, SpecFingerprint(case.spec, case.seed)
    idle = {join(path, name) for path, part, scope in walk(case.spec) for name in part.proof.idle(part, scope)}
    for path, part in walk_spec(case.spec):
        if LATER_LAYER.search(path):
            continue  # the first layer of each stack is enough for one spec
        for name, values in part.proof.samples.items():
            if join(path, name) in idle or not case.turn(join(path, name)):
                continue
            now, equal = getattr(part, name), False
            for value, other in _others(case.spec, join(path, name), now, values):
                if mine.differs(SpecFingerprint(other, case.seed)):
                    break
                equal = equal or not _may_be_equal(now, value)
            else:
                if not equal:
                    continue  # no other value is legal
                case.true(False, f"{join(path, name)}: changing it changes nothing")
            tested += 1
            case.true(True, f"{join(path, name)}: changing it changes something")
    if not tested:
        raise NotApplicable("no field has another legal value")


def _others(spec: Model, path: str, now: Any, values: list[Any]) -> Iterator[tuple[Any, Model]]:
    """(value, the spec with it) for the other legal values of a field: its samples, then numbers beside them."""
    numbers = [number for number in (now, *values) if type(number) is int and number > 0]
    for value in (*values, *(2 * number for number in numbers), *(number + 1 for number in numbers), *[1] * bool(numbers)):
        with contextlib.suppress(DovetailError):
            other = spec.set(path, value)
            if other != spec:
                check(other)
                yield value, other


def _may_be_equal(now: Any, value: Any) -> bool:
    """Whether two values may mean the same: None is a number that follows from other fields (`head`: width / heads)."""
    return (now is None and type(value) is int) or (value is None and type(now) is int)


class SpecFingerprint:
    """Everything that a field could change, the fast things first: each is computed only where those before are equal."""

    def __init__(self, spec: Model, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.computed = self.aspects()

    def differs(self, other: SpecFingerprint) -> bool:
        """Whether any aspect differs."""
        return any(_differ(mine, theirs) for mine, theirs in zip(self, other, strict=True))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.computed, again = itertools.tee(self.computed)
        return again

    @torch.no_grad()
    def aspects(self) -> Iterator[dict[str, Tensor]]:
        """Cost and shapes; masks and positions; outputs; initial weights; losses; decode state."""
        spec = self.spec
        cost = [parameters(spec), matmul_flops(spec), *attention_flops(spec, N), state_values(spec, 40), state_values(spec, 4)]
        yield {"cost": torch.tensor(cost), **{d.path: torch.tensor(d.weight.shape(d.scope)) for d in declared(spec)}}
        case = Case(spec, self.seed)
        yield masks_and_positions(case)
        yield {"outputs": case.run()}
        yield {"outputs in training": case.run(draws=Draws(11))}
        if spec.head is not None and spec.head.pools():  # the head may read one token per row only
            yield {"residual stream in training": case.stream(case.inputs, case.ctx(draws=Draws(11)))}
        yield {name: p.detach() for name, p in build(spec, dtype=DTYPE, seed=self.seed).named_parameters()}
        if spec.head is not None:
            yield {"loss": loss_of(case)}
        for draws in (None, Draws(11)):
            losses: dict[str, Tensor] = {}
            case.model.hidden(case.inputs, case.ctx(losses=Losses(losses), draws=draws))
            yield losses
        yield _decode_state(case)


@torch.no_grad()
def _decode_state(case: Case) -> dict[str, Tensor]:
    """The decode state of the layers after the inputs."""
    tokens = case.model.hidden(case.inputs, case.ctx())[0].shape[1]
    pool = Pool(case.spec, BATCH, tokens, dtype=DTYPE, source=1)
    step = pool.step(range(BATCH), [tokens] * BATCH)
    ctx = case.ctx(layout=step.layout)
    ctx.views = [{name: view for name, view in views.items() if not isinstance(view, SourceView)} for views in step.views]
    hidden, _ = case.model.hidden(case.inputs, ctx)
    drafts = Pool(case.spec, BATCH, tokens, dtype=DTYPE, drafts=True)
    if case.spec.mtp:
        step, before = drafts.step(range(BATCH), [tokens] * BATCH), hidden
        for depth in range(1, len(case.spec.mtp) + 1):
            _, before = case.model.draft(hidden, case.inputs, case.ctx(layout=step.layout, views=step.views), depth, before)
    groups = [*pool.groups.values(), *drafts.groups.values()]
    stores = [store for group in groups if group.per != "source" for store in group.tensors()]
    return {str(i): store for i, store in enumerate(stores)}


@torch.no_grad()
def masks_and_positions(case: Case) -> dict[str, Tensor]:
    """The values of each mask, scaling and position by itself, for short and long sequences: a window may be wider than the
    inputs of the case, and of two joined masks one may hide the other."""
    return {f"{n}: {what}": values for n in (5, 7, 160) for what, values in _masks_and_positions(case, n)}


def _masks_and_positions(case: Case, n: int) -> Iterator[tuple[str, Tensor]]:
    layout = TokenLayout.whole(1, n)
    for path, part in walk_spec(case.spec):
        if isinstance(part, Mask):
            yield f"{path} visible", part.visible(layout, layout, torch.arange(6))
        if isinstance(part, Scaling):
            plain = 10000.0 ** -(torch.arange(24, dtype=DTYPE) / 24)
            yield f"{path} frequencies", part.frequencies(plain, 10000.0) * part.amplitude()
            if part.varies:
                yield f"{path} at length", part.at_length(plain, 10000.0, torch.tensor([n])) * part.amplitude()
    for path, module in case.model.named_modules():
        if isinstance(module, PositionModule):
            scope = module.scope
            stream, heads = torch.zeros(1, n, scope.size("embed"), dtype=DTYPE), scope.sizes.get("heads")
            with contextlib.suppress(StateError):  # a learned table may be shorter
                yield f"{path} embed", module.embed(stream, layout)
            if heads is not None:
                ones = torch.ones(1, n, heads, scope.size("head"), dtype=DTYPE)
                yield f"{path} rotate", module.rotate(ones, layout)
            if module.tables():
                yield f"{path} score", module.score(layout, layout, *module.tables())


def _differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    if a.keys() != b.keys():
        return True
    return any(a[k].shape != b[k].shape or not torch.equal(a[k], b[k]) for k in a)
