"""Laws of declaration: declared = real (1), round trip (2), tapped (10), compiled = eager (11), every field counts (15)."""

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

from dovetail.account import Account
from dovetail.construction import build
from dovetail.core.check import check
from dovetail.core.ctx import Ctx, Listener
from dovetail.core.errors import DovetailError, StateError
from dovetail.core.fold import attention_flops, declared, matmul_flops, parameters, state_values, states, taps
from dovetail.core.group import Mask, PositionModule, Scaling
from dovetail.core.layout import TokenLayout
from dovetail.core.module import tensor_at
from dovetail.core.part import KINDS, join, walk, walk_spec
from dovetail.io.model_dir import save
from dovetail.io.spec import from_yaml, to_yaml
from dovetail.lawbook.case import BATCH, DTYPE, IDENTITY, Case, N, NotApplicable, law
from dovetail.lawbook.kernel import loss_of
from dovetail.model import BlockModule, Model
from dovetail.ops import attend
from dovetail.port.load import load
from dovetail.state.frame import SourceView
from dovetail.state.pool import Pool

LATER_LAYER = re.compile(r"layers\.[1-9]")


@law(1, "declared", "declared weights, counts, matmul FLOPs and state bytes are what is measured")
def declared_is_real(case: Case) -> None:
    """Names, shapes, counts; then FLOPs on the readable path; then the bytes of a pool."""
    spec = case.spec
    want = {d.path: d.weight.shape(d.scope) for d in declared(spec) if not d.weight.buffer}
    real = {name: tuple(p.shape) for name, p in case.model.named_parameters(remove_duplicate=False)}
    case.true(want == real, f"declared and real parameters differ: {set(want.items()) ^ set(real.items())}")
    count = sum(p.numel() for p in case.model.parameters())
    case.true(parameters(spec) == count, f"{parameters(spec)} parameters declared, {count} there")
    _flops(case)
    if spec.order() != "both":
        pool = Pool(spec, 1, N, dtype=DTYPE, source=N)
        whole = state_values(_unbounded(spec), N) * DTYPE.itemsize
        case.true(pool.bytes() == whole, f"{whole} bytes of state declared, {pool.bytes()} allocated")
        narrow = Pool(spec, 1, N, dtype=torch.bfloat16, source=N).bytes()  # some states stay in float32
        forecast = Account(_unbounded(spec), N, "bf16").state_bytes(N)
        case.true(forecast == narrow, f"{forecast} bytes of state forecast in bfloat16, {narrow} allocated")
        written = _remembered(case).values()
        case.true(all(bool((store[:-1] != 0).all()) for store in written), "state is declared that nothing is written to")
        if spec.encoder is None and all(state.window is not None for _, state, _ in states(spec)):
            ring, bounded = Pool(spec, 1, N, layout="ring", dtype=DTYPE, slack=0), state_values(spec, 10 * N) * DTYPE.itemsize
            case.true(ring.bytes() == bounded, f"{bounded} bytes of bounded state declared, {ring.bytes()} in rings")


def _unbounded(spec: Model) -> Model:
    """The same spec with masks that forget nothing: what a contiguous pool allocates."""
    return spec.swap("mask", KINDS["causal"]()) if spec.order() != "both" else spec


@torch.no_grad()
def _flops(case: Case) -> None:
    """Layers only: a head that pools, or an embedding that adds tokens, multiplies fewer or more tokens than the layers."""
    bare = dc.replace(case.spec, head=None)
    tokens = (
        case.run(layout=None).shape[1] if case.spec.head is None else case.model.hidden(case.inputs, case.ctx())[0].shape[1]
    )
    with attend.using("reference"), FlopCounterMode(display=False) as counter:
        case.model.hidden(case.inputs, case.ctx())
    measured = sum(counter.get_flop_counts()[BlockModule.__name__].values())
    blocks = [dc.replace(bare, layers=(b,)) for b in bare.layers]
    per_token = sum(matmul_flops(one) - matmul_flops_outside(one) for one in blocks)
    if bare.encoder is not None:
        per_token += matmul_flops(bare.encoder) - matmul_flops_outside(bare.encoder)
    want = BATCH * (per_token * tokens + attention_flops(bare, tokens)[0])
    case.true(measured == want, f"{want} FLOPs declared, {measured} measured")


def matmul_flops_outside(spec: Model) -> int:
    """Matmul FLOPs a token outside the layers of this stack."""
    return int(sum(2 * d.size * d.weight.used for d in declared(spec) if d.weight.matmul and not d.path.startswith("layers.")))


@law(2, "round_trip", "spec ↔ yaml ↔ spec; weights and model directories save and load bit for bit")
def round_trip(case: Case) -> None:
    """YAML; then the stored tensors; then a model directory, written and loaded."""
    text = to_yaml(case.spec)
    back = from_yaml(text)
    case.true(back == case.spec, f"the spec changed on its way through YAML:\n{text}")
    case.true(to_yaml(back) == text, "YAML of the spec read back is another")
    stored = {d.path: tensor_at(case.model, d.path).detach() for d in declared(case.spec) if d.weight.stored}
    fresh = build(case.spec, dtype=DTYPE, seed=case.seed + 1)
    with torch.no_grad():
        for path, value in load_bytes(save_bytes({k: v.contiguous() for k, v in stored.items()})).items():
            tensor_at(fresh, path).copy_(value)
        got = Case(case.spec, case.seed, fresh).run()
        case.same(got, case.run(), "answers with loaded weights", IDENTITY)
    with tempfile.TemporaryDirectory() as place:
        save(case.model, case.spec, Path(place) / "model")
        loaded = load(Path(place) / "model")
    case.true(loaded.part == case.spec, "the spec of a model directory is another")
    tensors = loaded.state_dict()
    case.true(tensors.keys() == case.model.state_dict().keys(), "a model directory holds other tensors")
    for name, value in case.model.state_dict().items():
        case.same(tensors[name], value, f"{name} of a model directory", IDENTITY)


@law(10, "tapped", "every tap fires once at its address; patching a tap with itself changes nothing")
@torch.no_grad()
def tapped(case: Case) -> None:
    """Listen everywhere, answer with copies, compare; and the stream is the sum of what was added."""
    seen: Counter[str] = Counter()
    heard: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> Tensor:
        seen[address] += 1
        heard[address] = x
        return x.clone()

    with attend.using("reference"):
        want = case.run()
        got = case.listening({"*": listen})
    case.same(got, want, "patching every tap with itself")
    head = [] if case.spec.head is None else taps(case.spec)
    expected = {address for address in head or taps(case.spec) if not address.startswith("encoder.")}
    case.true(set(seen) == expected, f"taps that fired and declared ones differ: {sorted(set(seen) ^ expected)[:6]}")
    case.true(set(seen.values()) <= {1}, f"fired more than once: {[a for a, n in seen.items() if n > 1][:4]}")
    for i, block in enumerate(case.spec.layers):
        names = block.branches()
        stream = heard[f"layers.{i}.in"]
        for name in names if block.wire.sums else ():
            stream = stream + heard[f"layers.{i}.{name}_add"]
            case.same(
                heard[f"layers.{i}.after_{name}"], stream, f"layers.{i}: the stream after {name} and what was added to it"
            )
        _pattern_rows(case, heard, f"layers.{i}.mixer.pattern")
    _tapped_elsewhere(case, heard)


def _tapped_elsewhere(case: Case, heard: dict[str, Tensor]) -> None:
    """The same values at the same addresses with the kernel that is chosen without a listener on patterns, in the encoder, and
    while decoding from a pool."""
    values: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> None:
        values[address] = x

    listener = Unedited({"*": listen})
    case.run(listen=listener)
    shared = [address for address in heard if address in values and heard[address].is_floating_point()]
    case.true(len(shared) > 0, "no tap fires with the chosen kernel")
    for address in shared:
        case.same(values[address], heard[address], f"{address} by the reference kernel and by the chosen one")
    if case.spec.encoder is not None and case.source is not None:
        values.clear()
        case.model.encode(
            case.source, Ctx(layout=TokenLayout.whole(case.source.shape[0], case.source.shape[1]), listen=listener)
        )
        fires = {address for address in taps(case.spec) if address.startswith("encoder.")}
        missing = {address for address in fires - values.keys() if not address.endswith(".pattern")}
        case.true(not missing, f"taps of the encoder that do not fire: {sorted(missing)[:4]}")
    if case.spec.order() == "causal" and case.spec.encoder is None:
        values.clear()
        pool = Pool(case.spec, BATCH, N, dtype=DTYPE)
        step = pool.step(range(BATCH), [N] * BATCH)
        case.stream(case.inputs, Ctx(layout=step.layout, views=step.views, listen=listener))
        for address in ("embedded", *(f"layers.{i}.after_{b.branches()[-1]}" for i, b in enumerate(case.spec.layers))):
            case.true(address in values, f"{address} does not fire while decoding")
            case.same(values[address], heard[address], f"{address} while decoding and in a whole pass")


class Unedited(Listener):
    """Listens to every tap that a fused kernel can show, so that any kernel may run."""

    def wants(self, address: str) -> bool:
        return False


def _pattern_rows(case: Case, heard: dict[str, Tensor], address: str) -> None:
    if address in heard:
        rows = heard[address].sum(-1)
        case.true(bool((rows <= 1 + 1e-9).all()) and bool((heard[address] >= 0).all()), f"{address}: rows that are no weights")


@law(11, "compiled", "compiled equals eager, with no graph break in the block, and taps leave no trace", slow=True, budget=4.0)
def compiled(case: Case) -> None:
    """Every block whole, by a backend that runs the captured graph as it is; and the graph with taps cut out is the same."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    block = case.model.layers[0]
    assert isinstance(block, BlockModule)
    ctx, x = _block_input(case)
    want = block(x, ctx, {})
    for cut in (False, True):
        torch.compiler.reset()
        with _without_taps() if cut else contextlib.nullcontext():
            got = torch.compile(block, backend=keep, fullgraph=True)(x, _fresh(ctx), {})
        case.same(got, want, "a compiled block and an eager one")
    training = dc.replace(_fresh(ctx), seed=5)
    got = torch.compile(block, backend="eager", fullgraph=True)(x, training, {})
    case.same(got, block(x, dc.replace(_fresh(ctx), seed=5), {}), "a compiled block and an eager one, in training")
    torch.compiler.reset()
    case.true(graphs[0] == graphs[1], "the graph without listeners is not the graph without taps")


def _fresh(ctx: Ctx) -> Ctx:
    """The same ctx with nothing computed yet."""
    layout = ctx.layout
    memory = ctx.encoder_layout
    again = None if memory is None else TokenLayout(memory.coords, memory.order, memory.seg, memory.row, memory.start)
    return dc.replace(
        ctx, layout=TokenLayout(layout.coords, layout.order, layout.seg, layout.row, layout.start), encoder_layout=again
    )


def _block_input(case: Case) -> tuple[Ctx, Tensor]:
    """What the first block is given."""
    found: list[Tensor] = []

    def keep(_: str, x: Tensor) -> None:
        found.append(x.detach())

    with torch.no_grad():
        ctx = case.ctx()
        _, layout = case.model.embed(case.inputs, ctx)
        case.listening({"layers.0.in": keep})
    return dc.replace(ctx, layout=layout), found[0]


@contextlib.contextmanager
def _without_taps() -> Iterator[None]:
    tap = Ctx.tap
    Ctx.tap = lambda self, module, name, x: x  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ctx.tap = tap  # type: ignore[method-assign]


@law(
    15,
    "every_field",
    "changing any field changes the output, the loss, the initial weights, the cost, the state or the shape",
    budget=1.0,
)
def every_field(case: Case) -> None:
    """Each field of each part moved to another of its samples."""
    tried, mine = 0, Fingerprint(case.spec, case.seed)
    idle = {join(path, name) for path, part, scope in walk(case.spec) for name in part.idle(scope)}
    for path, part in walk_spec(case.spec):
        if LATER_LAYER.search(path):
            continue  # one layer of each stack is enough for one spec
        for name, values in part.samples().items():
            if join(path, name) in idle or not case.turn(join(path, name)):
                continue
            other = _another(case.spec, join(path, name), values)
            if other is not None:
                tried += 1
                case.true(mine.differs(Fingerprint(other, case.seed)), f"{join(path, name)}: nothing changes with it")
    if not tried:
        raise NotApplicable("no field has another legal value")


def _another(spec: Model, path: str, values: list[Any]) -> Model | None:
    for value in values:
        with contextlib.suppress(DovetailError):
            other = spec.set(path, value)
            if other != spec:
                check(other)
                return other
    return None


class Fingerprint:
    """All that a field could change, the cheap things first: each is looked at only if those before are equal."""

    def __init__(self, spec: Model, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.seen: list[dict[str, Tensor]] = []
        self.more = self.looks()

    def differs(self, other: Fingerprint) -> bool:
        """Whether any look shows a difference."""
        return any(_differ(mine, theirs) for mine, theirs in zip(self, other, strict=True))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in itertools.count():
            if i == len(self.seen):
                found = next(self.more, None)
                if found is None:
                    return
                self.seen.append(found)
            yield self.seen[i]

    @torch.no_grad()
    def looks(self) -> Iterator[dict[str, Tensor]]:
        """Cost and shapes; what masks and positions say; initial weights; outputs; losses; decode state."""
        spec = self.spec
        cost = [parameters(spec), matmul_flops(spec), *attention_flops(spec, N), state_values(spec, 40), state_values(spec, 4)]
        yield {"cost": torch.tensor(cost), **{d.path: torch.tensor(d.weight.shape(d.scope)) for d in declared(spec)}}
        case = Case(spec, self.seed)
        yield own_answers(case)
        yield {"answers": case.run()}
        yield {"answers in training": case.run(seed=11)}
        if spec.head is not None and spec.head.pools():  # it may read no more than one token of a row
            yield {"stream in training": case.stream(case.inputs, case.ctx(seed=11))}
        yield {name: p.detach() for name, p in build(spec, dtype=DTYPE, seed=self.seed).named_parameters()}
        if spec.head is not None:
            yield {"loss": loss_of(case)}
        losses: dict[str, Tensor] = {}
        case.model.hidden(case.inputs, case.ctx(losses=losses))
        yield losses
        yield _remembered(case)


@torch.no_grad()
def _remembered(case: Case) -> dict[str, Tensor]:
    """What the layers write down of the inputs."""
    tokens = case.model.hidden(case.inputs, case.ctx())[0].shape[1]
    pool = Pool(case.spec, BATCH, tokens, dtype=DTYPE, source=1)
    step = pool.step(range(BATCH), [tokens] * BATCH)
    ctx = case.ctx(layout=step.layout)
    ctx.views = [{name: view for name, view in views.items() if not isinstance(view, SourceView)} for views in step.views]
    case.model.hidden(case.inputs, ctx)
    stores = [store for group in pool.groups.values() if group.per != "source" for store in group.tensors()]
    return {str(i): store for i, store in enumerate(stores)}


@torch.no_grad()
def own_answers(case: Case) -> dict[str, Tensor]:
    """What each mask and position says by itself, of short and long texts: a window may be wider than the text tried, and
    of two masks joined one may hide what the other does."""
    return {f"{n}: {what}": answer for n in (5, 7, 160) for what, answer in _own_answers(case, n)}


def _own_answers(case: Case, n: int) -> Iterator[tuple[str, Tensor]]:
    layout = TokenLayout.whole(1, n)
    for path, part in walk_spec(case.spec):
        if isinstance(part, Mask):
            yield f"{path} sees", part.visible(layout, layout, torch.arange(6))
        if isinstance(part, Scaling):
            ladder = 10000.0 ** -(torch.arange(24, dtype=DTYPE) / 24)
            yield f"{path} stretches", part.frequencies(ladder, 10000.0) * part.amplitude()
            if part.varies:
                yield f"{path} stretches now", part.at_length(ladder, 10000.0, torch.tensor([n])) * part.amplitude()
    for path, module in case.model.named_modules():
        if isinstance(module, PositionModule):
            scope = module.scope
            stream, heads = torch.zeros(1, n, scope.size("embed"), dtype=DTYPE), scope.sizes.get("heads")
            with contextlib.suppress(StateError):  # a learned table may end before
                yield f"{path} embeds", module.embed(stream, layout)
            if heads is not None:
                turned = torch.ones(1, n, heads, scope.size("head"), dtype=DTYPE)
                yield f"{path} rotates", module.rotate(turned, layout)
            if module.tables():
                yield f"{path} scores", module.score(layout, layout, *module.tables())


def _differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    if a.keys() != b.keys():
        return True
    return any(a[k].shape != b[k].shape or not torch.equal(a[k], b[k]) for k in a)
