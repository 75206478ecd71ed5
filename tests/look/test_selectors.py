"""Every selector, in every function that takes an address: it is honored, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import IDS, MIXED, MODEL, OTHER
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import DovetailError, InputError
from dovetail.look.address import TOKENS, Pick, is_state, suffix
from dovetail.look.components import attribute
from dovetail.look.effects import effect
from dovetail.look.gradient import gradient_times_input
from dovetail.look.probing import probe
from dovetail.look.record import Trace
from dovetail.look.streaming import stream
from dovetail.look.sweeps import ablate, attribution_patching, path_patching, sweep
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule
from dovetail.spec.fold import taps

Picks = dict[str, Pick]
EXPERTS = 4
N = IDS.shape[1]


def margin(logits: Tensor) -> Tensor:
    return logits[:, -1, 7] - logits[:, -1, 11] + 0.3 * logits[:, 4, 5]


@cache
def whole(model: ModelModule, other: bool = False) -> Trace:
    return trace(model, OTHER if other else IDS, "*", patch={"*.pattern": lambda p: p})


def logits(model: ModelModule, ids: Tensor, address: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    return trace(model, ids, "head.logits", patch={address: change})["head.logits"]


# -- random selectors, and what they mean


def a_pick(draw: random.Random, size: int) -> Pick:
    """Mostly of what there is; some past the end, or from the end."""

    def number() -> int:
        return draw.choices([draw.randrange(size), -1 - draw.randrange(size), draw.choice([size, -size - 1])], [12, 4, 1])[0]

    kind = draw.choices(["number", "range", "several"], [4, 2, 2])[0]
    if kind == "range":
        return slice(draw.choice([None, number()]), draw.choice([None, number()]))
    first, *more = dict.fromkeys(number() for _ in range(3))
    return (first, *more) if kind == "several" and more else first


def selectors(count: int, addresses: Callable[[ModelModule], list[str]]) -> Iterator[tuple[ModelModule, str, Picks]]:
    """Addresses with a slice along one to three of their axes."""
    draw = random.Random(4)
    for i in range(count):
        model = (MODEL, MIXED)[i % 2]
        address = draw.choice(addresses(model))
        axes, x = taps(model.part)[address].split(), whole(model)[address]
        sizes = {axis: x.shape[j - len(axes)] for j, axis in enumerate(axes)} | {"row": len(x), "step": 1}
        sizes |= {"expert": EXPERTS} if "choice" in axes else {}
        sizes |= {"pos": N} if is_state(address) else {}
        yield model, address, {axis: a_pick(draw, sizes[axis]) for axis in draw.sample(sorted(sizes), draw.choice([1, 2, 3]))}


def meant(pick: Pick, size: int) -> list[int]:
    """The indices that a pick means, as Python counts; InputError where some do not exist, or a range is empty."""
    listed = pick if isinstance(pick, tuple) else (pick,)
    numbers = list(range(size))[pick] if isinstance(pick, slice) else [int(n) + size * (int(n) < 0) for n in listed]  # type: ignore[arg-type]
    if not numbers or not all(0 <= n < size for n in numbers):
        raise InputError("there is none")
    return sorted({*numbers})


def inside(model: ModelModule, run: Trace, address: str, picks: Mapping[str, Pick]) -> Tensor:
    """Which values of an address a slice means; InputError where the run has no such slice."""
    x, axes = run[address], taps(model.part)[address].split()
    mask = torch.ones(x.shape, dtype=torch.bool)
    for axis, pick in picks.items():
        if axis == "step":
            bounds = (
                (pick.start or 0, pick.stop or 0) if isinstance(pick, slice) else pick if isinstance(pick, tuple) else (pick,)
            )
            if min(bounds) < 0 or meant(pick, 1) != [0]:  # type: ignore[type-var]
                raise InputError("steps are not counted from the end")
        elif axis == "expert":
            chosen = run[f"{address.partition('.ffn.')[0]}.ffn.router.chosen"]
            which = torch.isin(chosen, torch.tensor(meant(pick, EXPERTS)))
            mask = mask & which.reshape(*which.shape, *[1] * (x.dim() - which.dim()))
        elif axis == "pos" and axis not in axes:
            if meant(pick, N)[-1] != N - 1 or (isinstance(pick, tuple) and len(meant(pick, N)) > 1):
                raise InputError("a run holds its last state")
        else:
            dim = 0 if axis == "row" else x.dim() - len(axes) + axes.index(axis)
            index = torch.isin(torch.arange(x.shape[dim]), torch.tensor(meant(pick, x.shape[dim])))
            mask = mask & index.reshape([-1 if i == dim else 1 for i in range(x.dim())])
    return mask


def part(model: ModelModule, run: Trace, address: str, picks: Mapping[str, Pick], of: Tensor | None = None) -> Tensor:
    """The slice of a recorded activation: a number drops its axis, but for rows and tokens. Other experts are 0."""
    x, axes = run[address] if of is None else of, taps(model.part)[address].split()
    if "expert" in picks:
        x = torch.where(inside(model, run, address, {"expert": picks["expert"]}), x, 0)
    inside(model, run, address, picks)
    for axis, pick in sorted(picks.items(), key=lambda item: -axes.index(item[0]) if item[0] in axes else 1):
        if axis in axes or axis == "row":
            dim = 0 if axis == "row" else x.dim() - len(axes) + axes.index(axis)
            dim = dim if axis == "row" else 1 + axes.index(axis)
            x = x.index_select(dim, torch.tensor(meant(pick, x.shape[dim])))
            if isinstance(pick, int) and axis not in (*TOKENS, "row"):
                x = x.squeeze(dim)
    return x


def honored(what: str, got: Callable[[], Tensor], want: Callable[[], Tensor], rounding: float = 1e-9) -> bool:
    """Whether a call returns what is wanted; it must raise where there is nothing to return."""
    try:
        expected = want()
    except InputError:
        with pytest.raises(DovetailError, match=r"[:;]"):
            got()
        return False
    torch.testing.assert_close(got(), expected, rtol=rounding, atol=rounding, msg=lambda message: f"{what}: {message}")
    return True


# -- one forward pass


def floating(model: ModelModule) -> list[str]:
    return [address for address, x in whole(model).items() if x.is_floating_point()]


def read(model: ModelModule, key: str) -> Tensor:
    (x,) = trace(model, IDS, key, patch={"*.pattern": lambda p: p}).values()
    return x


def replaced(model: ModelModule, key: str, address: str, picks: Picks) -> Tensor:
    mask = inside(model, whole(model), address, picks)
    if not mask.any():  # experts that no token chooses
        raise InputError("nothing is replaced")
    return torch.where(mask, 7.0, whole(model)[address])


def test_a_slice_is_read_and_replaced_as_it_is_written() -> None:
    counts = [0, 0]
    for model, address, picks in selectors(300, floating):
        key = address + suffix(picks)
        counts[honored(f"read {key}", lambda: read(model, key), lambda: part(model, whole(model), address, picks))] += 1  # noqa: B023
        honored(
            f"replace {key}",
            lambda: trace(model, IDS, address, patch={key: 7.0})[address],  # noqa: B023
            lambda: replaced(model, key, address, picks),  # noqa: B023
        )
    assert min(counts) > 60


SWEPT = ("layers.1.in", "layers.1.mixer.z", "layers.1.ffn.bank.experts", "layers.0.mixer.y", "layers.0.mixer_add")


def swept(model: ModelModule) -> list[str]:
    return [address for address in SWEPT if address in whole(model)]


def only(metric: Mapping[str, float]) -> Tensor:
    (value,) = metric.values()
    return torch.tensor(value, dtype=torch.float64)


def test_sweeps_and_gradients_mean_the_same_slice() -> None:
    """Against one replacement of the whole activation, with the mask of the slice."""
    counts = [0, 0]
    for model, address, picks in selectors(60, swept):
        key = address + suffix(picks)

        def zeroed(model: ModelModule = model, address: str = address, picks: Picks = picks) -> Tensor:
            mask = inside(model, whole(model), address, picks)
            return logits(model, IDS, address, lambda x: torch.where(mask, 0, x))

        def patched(model: ModelModule = model, address: str = address, picks: Picks = picks) -> Tensor:
            mask = inside(model, whole(model, True), address, picks)
            return logits(model, OTHER, address, lambda x: torch.where(mask, whole(model)[address], x))

        def changed(model: ModelModule = model) -> Tensor:
            plain, other = whole(model)["head.logits"], zeroed()
            if torch.equal(plain, other):
                raise InputError("nothing is replaced")
            return ((other - plain).norm() / plain.norm()).to(torch.float64)

        def times_input(model: ModelModule = model, address: str = address, picks: Picks = picks) -> Tensor:
            of_whole = gradient_times_input(model, IDS, address, lambda x: margin(x).sum())
            if "expert" in picks:
                raise InputError("not all values of the slice are of the expert, so it cannot be written back")
            return part(model, whole(model), address, picks, of_whole)

        def estimated(model: ModelModule = model, address: str = address, picks: Picks = picks) -> Tensor:
            run = trace(model, OTHER, address, "head.logits", grad=True)
            base = margin(run["head.logits"]).mean()
            (grad,) = torch.autograd.grad(base, [run[address]])
            mask = inside(model, whole(model, True), address, picks)
            return base.detach() + ((whole(model)[address] - run[address].detach()) * grad)[mask].sum()

        def ablated(model: ModelModule = model, key: str = key) -> Tensor:
            return only(ablate(model, IDS, key, margin).metric)

        def swept_over(model: ModelModule = model, key: str = key) -> Tensor:
            return only(sweep(model, IDS, OTHER, key, margin).metric)

        def first_order(model: ModelModule = model, key: str = key) -> Tensor:
            return only(attribution_patching(model, IDS, OTHER, key, margin).metric)

        def change(model: ModelModule = model, key: str = key) -> Tensor:
            return torch.tensor(effect(model, IDS, key).change, dtype=torch.float64)

        def gradient(model: ModelModule = model, key: str = key) -> Tensor:
            return gradient_times_input(model, IDS, key, lambda x: margin(x).sum())

        counts[honored(f"ablate {key}", ablated, lambda z=zeroed: margin(z()).mean())] += 1
        honored(f"sweep {key}", swept_over, lambda p=patched: margin(p()).mean())
        honored(f"attribution {key}", first_order, estimated)
        honored(f"effect {key}", change, changed)
        honored(f"gradient {key}", gradient, times_input)
    assert min(counts) > 15


def test_an_axis_without_a_value_takes_each_in_turn() -> None:
    rows = ablate(MODEL, IDS, "layers.1.in[row, pos=2]", margin).metric
    assert list(rows) == ["layers.1.in[row=0, pos=2]", "layers.1.in[row=1, pos=2]"]
    experts = attribution_patching(MODEL, IDS, OTHER, "layers.1.ffn.bank.experts[expert]", margin).metric
    assert list(experts) == [f"layers.1.ffn.bank.experts[expert={e}]" for e in range(EXPERTS)]
    parts = attribute(MODEL, IDS, 17, "layers.1.mixer.z[head, row]").parts
    for head in range(6):
        both = attribute(MODEL, IDS, 17, f"layers.1.mixer.z[head={head}]").parts[f"layers.1.mixer.z[head={head}]"]
        for row in range(2):
            want = torch.where(torch.arange(2) == row, both, 0)
            torch.testing.assert_close(parts[f"layers.1.mixer.z[head={head}, row={row}]"], want)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "trace of a free axis": (lambda _: trace(MODEL, IDS, "layers.0.mixer.z[head]"), r"head has no value \(write head=0"),
    "patch of a free axis": (lambda _: trace(MODEL, IDS, patch={"layers.0.in[pos]": 0.0}), "pos has no value"),
    "path from a free axis": (
        lambda _: path_patching(MODEL, IDS, OTHER, "layers.0.mixer.z[head]", ["normed"], margin),
        "head has no value",
    ),
    "path into a later step": (
        lambda _: path_patching(MODEL, IDS, OTHER, "layers.0.mixer_add", ["normed[step=1]"], margin),
        "no such token or step",
    ),
    "sweep over steps": (lambda _: ablate(MODEL, IDS, "layers.0.in[step]", margin), "has one step of it; leave step out"),
    "sweep over states": (
        lambda _: ablate(MIXED, IDS, "layers.0.mixer.state[pos]", margin),
        "has one pos of it; leave pos out",
    ),
    "sweep of a later step": (lambda _: ablate(MODEL, IDS, "layers.0.in[step=1]", margin), "no such token or step"),
    "attribute of no token": (lambda _: attribute(MODEL, IDS, 17, "embedded[pos=40]"), "no such token or step"),
    "attribute of a later step": (lambda _: attribute(MODEL, IDS, 17, "embedded[step=2]"), "no such token or step"),
    "one token of two": (lambda _: trace(MODEL, IDS, "layers.0.in[pos=1|40]"), "pos=40: the run has no such token"),
    "a token twice": (lambda _: trace(MODEL, IDS, "layers.0.mixer.pattern[pos=1, query=2]"), "pos is the query of"),
    "a step from the end": (lambda _: trace(MODEL, IDS, "layers.0.in[step=-1]"), "the prompt is step 0"),
    "no such expert": (lambda _: trace(MODEL, IDS, "layers.1.ffn.bank.experts[expert=4]"), "experts are 0 to 3"),
    "experts of no mixture": (lambda _: trace(MODEL, IDS, "layers.0.in[expert=1]"), "has no axis 'expert'"),
    "probe of a row": (
        lambda _: probe(MODEL, IDS.repeat(4, 1), IDS.repeat(4, 1) % 2, "layers.0.in[row=0]"),
        "give only these rows",
    ),
    "probe of a token": (
        lambda _: probe(MODEL, IDS.repeat(4, 1), IDS.repeat(4, 1) % 2, "layers.0.in[pos=0]"),
        "needs a value for each token",
    ),
    "stream of a row": (lambda out: stream(MODEL, IDS, "layers.0.in[row=0]", out=out), "give only the rows"),
    "stream of a later step": (lambda out: stream(MODEL, IDS, "layers.0.in[step=1]", out=out), "no such token or step"),
    "row of a flat batch": (
        lambda _: trace(MODEL, IDS[0], "layers.0.in[row=0]", ctx=dt.Ctx(layout=dt.TokenLayout.flat([9]))),
        "name tokens by pos",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_honored_is_refused(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DovetailError, match=message):
        call(tmp_path / "acts")


# -- generation


NEW = 5


@cache
def generated() -> tuple[list[int], Trace]:
    """What follows the first row, and the activations of the prompt and all but the last new token."""
    ids = dt.build(MODEL.part, seed=1).generate(IDS[0], NEW, stop=())
    return ids, trace(dt.build(MODEL.part, seed=1), torch.tensor([[*IDS[0].tolist(), *ids[:-1]]]), "*")


def positions_of(pick: Pick, sizes: tuple[int, int]) -> list[int]:
    """The positions of N + NEW − 1 that a pick means: negative numbers count from the end of the prompt."""
    total, end = sizes
    if isinstance(pick, slice):
        bounds = [None if bound is None else bound + end * (bound < 0) for bound in (pick.start, pick.stop)]
        return [p for p in range(total) if p >= (bounds[0] or 0) and (bounds[1] is None or p < bounds[1])]
    numbers = [n + end * (n < 0) for n in (pick if isinstance(pick, tuple) else (pick,)) if n is not None]
    if not all(0 <= n < total for n in numbers):
        raise InputError("there is no such token")
    return sorted({*numbers})


def of_generation(run: Trace, address: str, picks: Picks) -> Tensor:
    """The slice of a generation, from the full forward pass over what it made."""
    step_of = [0] * N + list(range(1, NEW))
    tokens = positions_of(picks.get("pos", slice(None)), (N + NEW - 1, N))
    step = picks.get("step", slice(None))
    steps = list(range(NEW))[step] if isinstance(step, slice) else positions_of(step, (NEW, NEW))
    both = [p for p in tokens if step_of[p] in steps]
    wanted = [
        [("pos", p) for p in tokens if isinstance(picks.get("pos"), tuple)],
        [("step", s) for s in steps if isinstance(step, tuple)],
    ]
    if not both or {p for _, p in wanted[0]} - {*both} or {s for _, s in wanted[1]} - {step_of[p] for p in both}:
        raise InputError("some of it never happens")
    return run[address].index_select(1, torch.tensor(both))


def test_generation_means_the_same_slice() -> None:
    _, run = generated()
    draw, model, counts = random.Random(7), dt.build(MODEL.part, seed=1), [0, 0]
    for _ in range(60):
        address = draw.choice(["layers.1.in", "layers.2.mixer_add"])
        picks: Picks = {
            axis: a_pick(draw, size) for axis, size in {"pos": N + NEW, "step": NEW, "row": 1}.items() if draw.random() < 0.6
        }
        step = picks.get("step", 0)
        if any(
            (n or 0) < 0
            for n in ((step.start, step.stop) if isinstance(step, slice) else step if isinstance(step, tuple) else (step,))
        ):
            picks["step"] = slice(1, None)
        if picks.get("row", 0) not in (0, -1):
            picks.pop("row")
        key, seen = address + suffix(picks), Trace(address + suffix(picks))

        def traced(seen: Trace = seen) -> Tensor:
            model.generate(IDS[0], NEW, stop=(), trace=seen)
            (x,) = seen.values()
            return x

        counts[honored(f"generate {key}", traced, lambda: of_generation(run, address, picks), 1e-4)] += 1  # noqa: B023
    assert min(counts) > 10
