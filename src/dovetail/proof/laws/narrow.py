"""Law 17, narrow: in bfloat16 and float16 each step of a forward pass is about as accurate as rounding its result.

The narrow model and a float64 model hold the same rounded weights. The narrow one runs first, and every boundary is recorded:
each tap, the input and the output of each module, of each site of a position and of each product of an expert. Then the
float64 model runs on the same inputs. At each boundary its value is compared with the narrow one, and the narrow value goes on
in its place. So each step starts from equal values, no error travels past the next boundary, and what is compared is the
arithmetic between two boundaries:

    rms(narrow − float64)  ≤  4 · rms(rounded − float64) + 4 ulp         rounded: float64 rounded to the narrow dtype
                                                                          ulp = 2⁻²³ · rms(float64), that of a float32 interior

A tensor of one repeated value (a gate at its limit) may lie next to a narrow number by luck; so the error of rounding, where
there is one, counts as at least what it is on average, the spacing of the narrow numbers / √12.

The inputs of a step are narrow and equal, so `rounded` is the step with rounded inputs and outputs around a float64 interior. A
few narrow operations in a row pass (a rotation has 1.6 times the error of rounding, an MLP over a block of keys 2.8). An
interior that should be float32 and is not fails: rotary angles at a long position, a softmax over rounded scores, a softplus of
a sum far from 0. Both the reference attention kernel and the tiled one are compared; only the reference has attention probs.

Settings that make such errors large enough to see: positions start at 4096 where the spec allows it; biases are four times as
large as in other laws; routers are nearly tied (the rows of a router's matrix differ by a thirty-second of what they would),
and their choices, which are integers, must be those of float32. Recurrent mixers are also decoded token by token. Their state
at the end may have twice the error of rounding: room for one rounding, not for one at every step.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dovetail.account import longest_length
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.groups import PositionModule, RouterModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear
from dovetail.nn.module import tensor_at
from dovetail.nn.recur import RecurrentModule
from dovetail.ops import attend, attend_tiled
from dovetail.proof.laws.case import BATCH, DTYPE, Broken, Case, law, perturbed
from dovetail.proof.laws.kernel import of_dtype, small_tiles
from dovetail.spec.fold import declared, needs_of
from dovetail.state.pool import Pool

BOUND, STATE = 4.0, 2.0  # of the error of rounding the result alone: for a step, and for a recurrent state
ULPS = 4.0  # of float32, in which an interior computes
NARROW = (torch.bfloat16, torch.float16)
TOKENS, FAR = 48, 4096  # tokens per row, and the position of the first
BIASED = 4.0  # how much larger than usual biases are
TIED = 32  # how much nearer than usual the rows of a router's matrix are to each other
PROBS = "pattern"  # the tap of attention probs
STATE_OF = "state of"  # how the name of a recurrent state begins
# methods whose results are boundaries: the sites of a position, the products of a bank of experts
SITES = {PositionModule: ("embed", "rotate", "on_write", "on_read"), Linear: ("grouped",)}
At = Callable[[str, Tensor], Tensor]  # (name of a boundary, its value) -> the value that goes on


@law(
    17,
    "narrow",
    "in bfloat16 and float16 each step of a forward pass is about as accurate as rounding its result",
    "values",
    budget=1.5,
)
@torch.no_grad()
def narrow(case: Case) -> None:
    """One whole pass in each dtype; then routers on recorded inputs; then recurrent mixers token by token. Among hundreds of
    specs each is tested in bfloat16 and one in six in float16, which differs in its range and in the size of its errors."""
    for dtype in NARROW[: 2 if case.turn("float16") else 1]:
        pair = NarrowPair(case.spec, dtype, case.seed)
        if all(pair.compare_whole(case, kernel) for kernel in pair.kernels(case)):
            pair.compare_choices(case)
            pair.compare_decoding(case)


class NarrowPair:
    """A narrow model, a float64 model with the same weights, and the values recorded at the narrow one's boundaries."""

    @torch.no_grad()
    def __init__(self, spec: Model, dtype: torch.dtype, seed: int) -> None:
        self.spec, self.dtype, self.seed = spec, dtype, seed
        self.narrow, self.exact = perturbed(spec, seed, dtype), build(spec, dtype=DTYPE, seed=seed)
        for d in declared(spec):
            if d.weight.role == "const" or d.weight.same_as is not None:
                continue
            weight = tensor_at(self.narrow, d.path)
            if d.weight.role == "bias":
                weight.mul_(BIASED)
            if d.weight.matmul and d.scope.names(d.weight.out) == ("experts",):
                mean = weight.mean(0, keepdim=True)
                weight.copy_(mean + (weight - mean) / TIED)
            tensor_at(self.exact, d.path).copy_(weight)
        end = longest_length(spec)
        self.n = TOKENS if end is None else min(TOKENS, end)
        # positions may be offset in a table, so its own end is no safe place to start from
        self.start = FAR if end is None and spec.embed.causal() else 0
        self.case = Case(spec, seed, self.narrow, n=self.n)  # its inputs are rounded, for both models
        self.given: dict[str, tuple[Tensor, Ctx]] = {}  # the input of each router and recurrent mixer of the narrow model

    def kernels(self, case: Case) -> list[str]:
        """The kernels to compare: the reference, and in turn the tiled one if it offers what the spec needs. With the tiled
        kernel recurrences run in chunks, with the reference token by token."""
        needs = needs_of(self.spec)
        return ["reference", "tiled"] if needs <= attend_tiled.OFFERS and case.turn("narrow tiled") else ["reference"]

    def compare_whole(self, case: Case, kernel: str) -> bool:
        """Every boundary of a whole pass with an attention kernel; false where a value is beyond the range of the dtype."""
        recorded = Recorded()
        # attention probs are computed as a whole only by the reference kernel
        without = () if kernel == "reference" else (PROBS,)
        with attend.using(kernel), small_tiles():
            with boundaries(self.narrow, recorded.keep), self._inputs_recorded():
                self._run(self.narrow, Without(without, recorded.keep))
            with boundaries(self.exact, recorded.compare):
                self._run(self.exact, Without(without, recorded.compare))
        return self.compare(case, recorded, "" if kernel == "reference" else f", by the {kernel} kernel")

    def _run(self, model: ModelModule, listener: Listener) -> None:
        dtype = model.dtype
        more: dict[str, Any] = {}
        if self.case.source is not None:
            source = Ctx(layout=TokenLayout.whole(BATCH, self.n), patches=self.case.source_patches, taps=listener)
            more["encoder_output"], more["encoder_layout"] = model.encode(of_dtype(self.case.source, dtype), source)
        layout = TokenLayout.whole(BATCH, self.n, start=self.start)
        model(of_dtype(self.case.inputs, dtype), Ctx(layout=layout, patches=self.case.patches, taps=listener, **more))

    def compare_choices(self, case: Case) -> None:
        """The experts that a nearly tied router chooses for the same input: those of a float32 router. A float64 one orders
        scores that are equal in float32, where a sigmoid of 20 is 1."""
        for path, router in self.exact.named_modules():
            if isinstance(router, RouterModule) and path in self.given:
                x, ctx = self.given[path]
                plain = Ctx(layout=ctx.layout)
                got = self.narrow.get_submodule(path)(x, plain)[0]
                want = copy.deepcopy(router).float()(of_dtype(x, torch.float32), plain)[0]
                changed = int((got != want).any(-1).sum())
                case.true(changed == 0, f"{self.name}: {path}: {changed} tokens of {got[..., 0].numel()} go to other experts")

    def compare_decoding(self, case: Case) -> None:
        """Recurrent mixers token by token, each from a decode state of its own dtype."""
        if self.spec.order() == "both":
            return
        for i, block in enumerate(self.narrow.layers):
            for branch in block.branches:
                mixer, path = block.get_submodule(branch), f"layers.{i}.{branch}"
                if isinstance(mixer, RecurrentModule) and path in self.given:
                    self._decode(case, path, i, branch, self.given[path][0])

    def _decode(self, case: Case, path: str, layer: int, branch: str, x: Tensor) -> None:
        recorded = Recorded()
        for model, at in ((self.narrow, recorded.keep), (self.exact, recorded.compare)):
            mixer, dtype = model.get_submodule(path), model.dtype
            assert isinstance(mixer, RecurrentModule)
            pool = Pool(self.spec, BATCH, self.n, dtype=dtype, source=1)
            # each model carries its own state from token to token, so that errors of many steps add up
            states = mixer.part.taps(mixer.scope).keys() - mixer.part.TAPS
            with boundaries(mixer, at, path):
                ends = range(max(pool.ahead, 1), self.n + 1)
                for begin, end in pairwise([0, *ends]):
                    step = pool.step(range(BATCH), [end - begin] * BATCH)
                    ctx = Ctx(layout=step.layout, taps=Without(states, at))
                    mixer(of_dtype(x[:, begin:end], dtype), ctx, step.views[layer][branch])
            stores = [store for group in pool.groups.values() for store in group.stores.get((layer, branch), ())]
            for i, store in enumerate(stores):
                at(f"{STATE_OF} {path}.{i}", store)
        self.compare(case, recorded, ", token by token")

    @property
    def name(self) -> str:
        """The narrow dtype's name."""
        return str(self.dtype).removeprefix("torch.")

    def compare(self, case: Case, recorded: Recorded, how: str) -> bool:
        """Hold every boundary to the bound, one that came several times as one tensor; false where the dtype cannot hold a
        value, after which nothing can be compared."""
        case.true(recorded.complete, f"{self.name}: the float64 model passes other boundaries{how}")
        for name, values in recorded.pairs.items():
            got, want = (torch.cat([value.flatten() for value in side]) for side in zip(*values, strict=True))
            if not want.is_floating_point() or want.numel() == 0:
                continue
            if want.abs().max() > torch.finfo(self.dtype).max:
                return False
            case.compared += 1
            error, limit = rms(got.double() - want), self.limit(want, STATE if name.startswith(STATE_OF) else BOUND)
            if not error <= limit:
                raise Broken(f"{self.name}: {name}{how}: the rms error is {error:.3g}, the limit {limit:.3g}")
        return True

    def limit(self, want: Tensor, factor: float) -> float:
        """The largest rms error that passes."""
        errors = want.to(self.dtype).double() - want
        # of the narrow numbers around each value that is none of them: a step that only moves numbers may not change them
        spacing = (torch.finfo(self.dtype).eps * 2.0 ** (torch.frexp(want).exponent - 1.0)).masked_fill(errors == 0, 0.0)
        rounding = max(rms(errors), rms(spacing) / 12**0.5)
        return factor * rounding + ULPS * torch.finfo(torch.float32).eps * rms(want)

    @contextlib.contextmanager
    def _inputs_recorded(self) -> Iterator[None]:
        """Keep the inputs of routers and recurrent mixers of the narrow model."""

        def keep(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
            self.given[path] = (args[0], args[1])

        with contextlib.ExitStack() as undo:
            for path, module in self.narrow.named_modules():
                if isinstance(module, (RouterModule, RecurrentModule)):
                    undo.callback(module.register_forward_pre_hook(partial(keep, path)).remove)
            yield


class Without(Listener):
    """Hears every tap but those of these names."""

    def __init__(self, names: Collection[str], at: At) -> None:
        super().__init__({"*": at})
        self.names = names

    def wants(self, address: str) -> bool:
        """Whether the tap has none of the names."""
        return address.rpartition(".")[2] not in self.names

    def hear(self, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Pass on what is wanted."""
        return super().hear(address, x, layout) if self.wants(address) else x


class Recorded:
    """Values at the boundaries of one run, in order, and beside each the value of a second run."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Tensor]] = []
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.compared = 0

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Record a boundary of the narrow run."""
        self.values.append((name, value))
        return value

    def compare(self, name: str, value: Tensor) -> Tensor:
        """Put the float64 value beside the narrow one, which goes on in its place."""
        expected, got = self.values[self.compared]
        if expected != name or got.shape != value.shape:
            raise Broken(f"{expected} {tuple(got.shape)} comes where {name} {tuple(value.shape)} comes in float64")
        self.compared += 1
        self.pairs[name].append((got, value))
        return of_dtype(got, DTYPE)

    @property
    def complete(self) -> bool:
        """Whether the second run passed every boundary of the first."""
        return self.compared == len(self.values)


@contextlib.contextmanager
def boundaries(root: nn.Module, at: At, path: str = "") -> Iterator[None]:
    """Show inputs and outputs of every module below `root`, and every site of a position, to `at`, which may replace them."""

    def each(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(at(f"{name}[{i}]", one) if isinstance(one, Tensor) else one for i, one in enumerate(values))

    def entered(name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return each(name, args)

    def left(name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return each(name, out) if isinstance(out, tuple) else at(name, out)

    with contextlib.ExitStack() as undo:
        for name, module in root.named_modules():
            where = f"{path}.{name}".strip(".")
            if name and not isinstance(module, nn.ModuleList):
                undo.callback(module.register_forward_pre_hook(partial(entered, f"input of {where}")).remove)
                undo.callback(module.register_forward_hook(partial(left, f"output of {where}")).remove)
            for site in (site for kind, sites in SITES.items() if isinstance(module, kind) for site in sites):
                plain = getattr(module, site)
                shown = partial(_shown, at, plain, f"{where} {site}")
                undo.enter_context(patch.object(module, site, shown))
        yield


def _shown(at: At, site: Callable[..., Tensor], name: str, x: Tensor, *more: Any) -> Tensor:
    """Call a site with its input and its result shown."""
    return at(name, site(at(f"input of {name}", x), *more))


def rms(x: Tensor) -> float:
    """The root of the mean square."""
    return float(x.square().mean().sqrt())
