"""Foreign: a model that is not built from a spec, under test. Any Hugging Face class, any `nn.Module` that takes token ids.

    hf:DIR                a directory in Hugging Face layout, run by transformers; with config.json alone its weights are random
    py:file.py:factory    the result of a function: an nn.Module, or (module, vocabulary)

A module is called with token ids (batch, n) and returns outputs (batch, n, …). Its other features are detected by calling it:

    attention_mask        (batch, n), 1 at real tokens: supported where a mask of ones changes nothing
    position_ids          (batch, n): supported where 0 … n − 1 changes nothing
    cache                 a value that the model returns beside its outputs and takes as an argument, under any names
    documents             packed documents are separated by positions that restart at 0

Everything runs in float64, code that asks for float32 included (proof/compare/float64.py); tolerances are 1e-9 of the scale.
Where some operator still returns float32 they are 1e-5; for a model that runs in float32 only, 1e-4.

Random weights are perturbed: as they are first, they hide bugs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.base.errors import FileError
from dovetail.model.construction import generator
from dovetail.proof.compare.decoding import Cache, arguments_of, find_cache
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.record import answer_of
from dovetail.proof.compare.user_code import first_line
from dovetail.proof.laws.case import LENGTHS, RELATION, N
from dovetail.proof.laws.law import LawCase

PARTLY, SINGLE = 1e-5, 1e-4  # tolerances where some operators, or all of them, return float32
SPREADS = (1.0, 0.3, 0.0)  # factors of the perturbation of weights; a smaller one where outputs are not finite
Make = Callable[[], Any]


class Narrowest(TorchDispatchMode):
    """Records whether an operator returns a tensor narrower than float64."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and check the dtypes of its outputs."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.dim() > 0:
                self.narrow = True
        return out


def module_of(result: Any) -> nn.Module:
    """The module in the result of a factory."""
    module = result[0] if isinstance(result, tuple) else result
    if not isinstance(module, nn.Module):
        raise FileError(f"the factory returned {type(module).__name__}, not an nn.Module")
    return module


def given_vocabulary(make: Make) -> int | None:
    """The size of the vocabulary, where the factory returns one."""
    result = make()
    return int(result[1]) if isinstance(result, tuple) else None


@torch.no_grad()
def perturb(model: nn.Module, factor: float, seed: int) -> None:
    """Perturb every weight. Initial weights hide bugs: attention is nearly uniform, norms are one, biases zero."""
    for name, weight in model.named_parameters():
        if factor and weight.requires_grad:  # not the balancing bias of a router: some experts would get no token
            noise = torch.randn(weight.shape, generator=generator(seed, f"moved {name}"), dtype=torch.float64)
            spread = 1.2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
            weight.add_((noise * spread * factor).to(weight.dtype))


class Foreign(LawCase):
    """One foreign model under test."""

    def __init__(self, make: Make, label: str, *, seed: int = 0, move: bool = True) -> None:
        """`make` constructs a new module at every call; with `move` its initial weights are perturbed."""
        super().__init__()
        self.make, self.label, self.seed = make, label, seed
        self.model, self.dtype = self._runs(move)
        self.tolerance = SINGLE if self.dtype != torch.float64 else PARTLY if self._narrow() else RELATION

    # -- setting it up

    def _runs(self, move: bool) -> tuple[nn.Module, torch.dtype]:
        """The module in the widest dtype that it runs in, with the largest perturbation whose outputs are finite."""
        reason: Exception | None = None
        for dtype in (torch.float64, torch.float32):
            for spread in SPREADS if move else (0.0,):
                try:
                    with self._seeded(), float32_islands_widened(dtype):
                        model = module_of(self.make()).to(dtype).eval()
                    perturb(model, spread, self.seed)
                    self.model, self.dtype = model, dtype
                    if bool(self.outputs(self.tokens[:1]).isfinite().all()):
                        return model, dtype
                    reason = ValueError("its outputs are not finite")
                except FileError:
                    raise
                except Exception as error:
                    self.__dict__.pop("tokens", None)
                    reason = error
                    break
        raise FileError(f"{self.label}: does not run on token ids (batch, n): {first_line(reason)}") from reason

    def _narrow(self) -> bool:
        """Whether some operator returns less than float64."""
        with Narrowest() as recorded, torch.no_grad():
            self.outputs(self.tokens[:1])
        return recorded.narrow

    def single(self) -> nn.Module:
        """A new module in float32, as its author would run it."""
        with self._seeded():
            model = module_of(self.make()).float().eval()
        perturb(model, SPREADS[1], self.seed)
        return model

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield

    # -- calling it

    def call(self, tokens: Tensor, **how: Any) -> Any:
        """The result of the model for tokens (batch, n), with the same random seed in every call."""
        with self._seeded(), float32_islands_widened(self.dtype):
            return self.model(tokens, **how)

    def outputs(self, tokens: Tensor, **how: Any) -> Tensor:
        """The outputs of every token: (batch, n, …)."""
        out = answer_of(self.call(tokens, **how))
        if out.shape[:2] != tokens.shape[:2]:
            raise ValueError(f"outputs of shape {tuple(out.shape)} for {tuple(tokens.shape)} tokens")
        return out

    @cached_property
    def tokens(self) -> Tensor:
        """(rows, n) random token ids without special tokens."""
        return self.random_tokens(len(LENGTHS), "tokens")

    def random_tokens(self, rows: int, what: str) -> Tensor:
        """(rows, n) random token ids without special tokens, a function of (seed, what)."""
        ordinary = torch.tensor([i for i in range(self.vocab) if i not in self.special])
        return ordinary[torch.randint(len(ordinary), (rows, N), generator=generator(self.seed, what))]

    @cached_property
    def vocab(self) -> int:
        """The size of the vocabulary: from the factory, from the embedding that receives the ids, or from the config."""
        if (given := given_vocabulary(self.make)) is not None:
            return given
        ids, sizes = torch.zeros(1, N, dtype=torch.long), []

        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, nn.Embedding) and isinstance(args[0], Tensor) and args[0].shape[-1:] == ids.shape[-1:]:
                sizes.append(module.num_embeddings)

        handles = [m.register_forward_pre_hook(record) for m in self.model.modules() if isinstance(m, nn.Embedding)]
        with contextlib.ExitStack() as stack, torch.no_grad():
            for handle in handles:
                stack.callback(handle.remove)
            self.call(ids)
        if not sizes and isinstance(size := self.config.get("vocab_size"), int):
            return size
        if not sizes:
            raise FileError(f"{self.label}: no nn.Embedding receives the token ids; return (module, vocabulary) instead")
        return sizes[0]

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of special tokens in the config."""
        return frozenset(v for k, v in self.config.items() if k.endswith("token_id") and isinstance(v, int))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config as plain data; empty where it has none."""
        to_dict = getattr(getattr(self.model, "config", None), "to_dict", None)
        return to_dict() if to_dict is not None else {}

    @property
    def padding(self) -> int:
        """The id of padding tokens; it must not matter which."""
        pad = self.config.get("pad_token_id")
        return pad if isinstance(pad, int) and 0 <= pad < self.vocab else 1

    # -- its features

    @cached_property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """The arguments of its forward besides the token ids."""
        return arguments_of(self.model)

    def _takes(self, name: str, neutral: Tensor) -> bool:
        """Whether it has an argument, and a neutral value of it changes nothing."""
        if name not in self.arguments:
            return False
        try:
            with torch.no_grad():
                got, want = self.outputs(self.tokens[:1], **{name: neutral}), self.outputs(self.tokens[:1])
        except Exception:
            return False
        return self._near(got, want)

    def _near(self, got: Tensor, want: Tensor) -> bool:
        return got.shape == want.shape and bool(((got - want).abs() <= self.tolerance * want.abs().max().clamp(min=1)).all())

    @cached_property
    def masks(self) -> bool:
        """Whether it supports attention_mask."""
        return self._takes("attention_mask", torch.ones(1, N, dtype=torch.long))

    @cached_property
    def positions(self) -> bool:
        """Whether it supports position_ids."""
        return self._takes("position_ids", torch.arange(N)[None])

    @property
    def without_cache(self) -> dict[str, Any]:
        """Arguments that turn off a cache that is on by default: with a cache, positions do not separate documents."""
        return {"use_cache": False} if "use_cache" in self.arguments else {}

    @cached_property
    def documents(self) -> bool:
        """Whether positions that restart separate documents: then a mask of ones, with which they do not, changes outputs."""
        if not (self.masks and self.positions):
            return False
        restarted, ones = torch.cat([torch.arange(9), torch.arange(N - 9)])[None], torch.ones(1, N, dtype=torch.long)
        with torch.no_grad():
            separated = self.outputs(self.tokens[:1], position_ids=restarted, **self.without_cache)
            together = self.outputs(self.tokens[:1], position_ids=restarted, attention_mask=ones, **self.without_cache)
        return not self._near(separated, together)

    @cached_property
    def cache(self) -> Cache | None:
        """How it returns and takes its cache; None where it has none."""
        with torch.no_grad():
            return find_cache(self.call, self.arguments, self.tokens[:1, :5], self.tokens[:1, 5:6])

    @cached_property
    def mask_covers(self) -> str | None:
        """With a cache, the tokens of a mask: "all" so far, or the "new" ones; None where it supports neither."""
        cache = self.cache
        if cache is None or not self.masks:
            return None
        tokens = self.tokens[:1]

        def steps(begin: int | None) -> Tensor:
            out = self.call(tokens[:, :5], **cache.flags)
            for t in (5, 6):  # a wrong mask may change only the cache, so two steps are compared
                mask = {} if begin is None else {"attention_mask": torch.ones(1, t + 1, dtype=torch.long)[:, begin * t :]}
                out = self.call(tokens[:, t : t + 1], **{**cache.flags, cache.argument: cache.of(out), **mask})
            return answer_of(out)

        with torch.no_grad():
            want = steps(None)
            for name, begin in (("all", 0), ("new", 1)):
                with contextlib.suppress(Exception):
                    if self._near(steps(begin), want):
                        return name
        return None

    # -- comparing

    def same(self, got: Tensor, want: Tensor, what: str, tolerance: float | None = None) -> None:
        """Compare outputs (…, n, channels) within the tolerance of their scale. A gap is recorded, and the law continues."""
        self.compared += 1
        if got.shape != want.shape:
            self.gap(f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)}")
            return
        scale = max(want.abs().max().item(), 1.0)
        each = (got - want).abs().reshape(*got.shape[: min(got.dim() - 1, 2)], -1).amax(-1) / scale  # (n) or (rows, n)
        bad = (~(each <= (self.tolerance if tolerance is None else tolerance))).nonzero()
        if len(bad):
            where = [int(i) for i in bad[0]]
            row = f"row {where[0]}, " if len(where) == 2 else ""
            gap = each.nan_to_num(float("inf")).max().item()
            self.gap(f"{what}: first differ at {row}position {where[-1]}, by up to {gap:.1e} of their scale")
