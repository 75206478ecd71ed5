"""Foreign: a model that is not ours, as laws see one. Any Hugging Face class, any `nn.Module` that takes token ids.

    hf:DIR                a directory in Hugging Face layout, run by transformers; with config.json alone its weights are random
    py:file.py:factory    what a function returns: an nn.Module, or (module, vocabulary)

A module is called with tokens (batch, n) and gives numbers (batch, n, …) for each. What else it offers is found by trying:

    attention_mask        (batch, n), 1 at real tokens: taken where a mask of ones changes nothing
    position_ids          (batch, n): taken where 0 … n − 1 changes nothing
    memory                what the model gives back beside its answer and takes again as an argument; whatever both are called
    documents             positions that begin anew part the documents of a row: where they say more than where a token stands

Everything runs in float64, also what asks for float32 (verification/float64.py); relations then hold to 1e-9 of their scale.
Where some operator gives float32 all the same, 1e-5; a model that runs in float32 alone is held to 1e-4.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.construction import generator
from dovetail.core.errors import FileError
from dovetail.lawbook.case import RELATION, Broken
from dovetail.lawbook.foreign.make import MOVES, Make, Narrowest, first_line, module_of, move_weights, told_vocabulary
from dovetail.verification.float64 import float32_islands_widened
from dovetail.verification.record import answer_of

N, LENGTHS = 21, (21, 9, 14)
PARTLY, SINGLE = 1e-5, 1e-4  # tolerances where some operator, or all of them, give float32


@dc.dataclass(frozen=True)
class Memory:
    """How a model is asked for its memory, and how it takes it back."""

    asked: Mapping[str, Any]
    argument: str
    place: str | int  # where it lies in what the model gives

    def of(self, out: Any) -> Any:
        """The memory in what a model gave."""
        return out[self.place]


class Foreign:
    """One foreign model under test."""

    def __init__(self, make: Make, label: str, *, seed: int = 0, move: bool = True) -> None:
        """`make` constructs the module anew at every call; with `move` its initial weights are perturbed."""
        self.make, self.label, self.seed, self.compared = make, label, seed, 0
        self.gaps: list[str] = []
        self.model, self.dtype = self._runs(move)
        self.tolerance = SINGLE if self.dtype != torch.float64 else PARTLY if self._narrow() else RELATION

    # -- making it run

    def _runs(self, move: bool) -> tuple[nn.Module, torch.dtype]:
        """The module in the widest dtype that it runs in, with weights that give numbers."""
        reason: Exception | None = None
        for dtype in (torch.float64, torch.float32):
            for far in MOVES if move else (0.0,):
                try:
                    with self._seeded(), float32_islands_widened(dtype):
                        model = module_of(self.make()).to(dtype).eval()
                    move_weights(model, far, self.seed)
                    self.model, self.dtype = model, dtype
                    if bool(self.answer(self.tokens[:1]).isfinite().all()):
                        return model, dtype
                    reason = ValueError("its answer holds numbers that are not finite")
                except FileError:
                    raise
                except Exception as error:
                    self.__dict__.pop("tokens", None)
                    reason = error
                    break
        raise FileError(f"{self.label}: does not run on token ids (batch, n): {first_line(reason)}") from reason

    def _narrow(self) -> bool:
        """Whether something is computed in less than float64 all the same."""
        with Narrowest() as seen, torch.no_grad():
            self.answer(self.tokens[:1])
        return seen.narrow

    def single(self) -> nn.Module:
        """The module made anew as its author would run it, in float32."""
        with self._seeded():
            model = module_of(self.make()).float().eval()
        move_weights(model, MOVES[1], self.seed)
        return model

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield

    # -- asking it

    def call(self, tokens: Tensor, **how: Any) -> Any:
        """What the model gives for tokens (batch, n). What it draws at random it draws alike at every call."""
        with self._seeded(), float32_islands_widened(self.dtype):
            return self.model(tokens, **how)

    def answer(self, tokens: Tensor, **how: Any) -> Tensor:
        """Its numbers for every token: (batch, n, …)."""
        found = answer_of(self.call(tokens, **how))
        if found.shape[:2] != tokens.shape[:2]:
            raise ValueError(f"answers with shape {tuple(found.shape)} to {tuple(tokens.shape)} tokens")
        return found

    @cached_property
    def tokens(self) -> Tensor:
        """(rows, n) tokens that mean nothing special to it."""
        return self.drawn(len(LENGTHS), "tokens")

    def drawn(self, rows: int, what: str) -> Tensor:
        """(rows, n) random tokens that mean nothing special to the model."""
        ordinary = torch.tensor([i for i in range(self.vocab) if i not in self.special])
        return ordinary[torch.randint(len(ordinary), (rows, N), generator=generator(self.seed, what))]

    @cached_property
    def vocab(self) -> int:
        """How many tokens there are: as the factory says, or the rows of the table that looks ids up, or by the config."""
        if (told := told_vocabulary(self.make)) is not None:
            return told
        ids, sizes = torch.zeros(1, N, dtype=torch.long), []

        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, nn.Embedding) and isinstance(args[0], Tensor) and args[0].shape[-1:] == ids.shape[-1:]:
                sizes.append(module.num_embeddings)

        handles = [m.register_forward_pre_hook(see) for m in self.model.modules() if isinstance(m, nn.Embedding)]
        with contextlib.ExitStack() as stack, torch.no_grad():
            for handle in handles:
                stack.callback(handle.remove)
            self.call(ids)
        if not sizes and isinstance(said := self.config.get("vocab_size"), int):
            return said
        if not sizes:
            raise FileError(f"{self.label}: no embedding looked the tokens up; let the factory return (module, vocabulary)")
        return sizes[0]

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids with a meaning of their own, as a config names them."""
        return frozenset(v for k, v in self.config.items() if k.endswith("token_id") and isinstance(v, int))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config as plain data; nothing where it has none."""
        found = getattr(self.model, "config", None)
        to_dict = getattr(found, "to_dict", None)
        return to_dict() if to_dict is not None else {}

    @property
    def padding(self) -> int:
        """The token that padding is made of: it must not matter which."""
        pad = self.config.get("pad_token_id")
        return pad if isinstance(pad, int) and 0 <= pad < self.vocab else 1

    # -- what it offers

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """The arguments of its forward beside the tokens."""
        found = list(inspect.signature(self.model.forward).parameters.items())
        return {name: p for name, p in found[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def _takes(self, name: str, neutral: Tensor) -> bool:
        """Whether it takes an argument, and a value that should change nothing changes nothing."""
        if name not in self.arguments:
            return False
        try:
            with torch.no_grad():
                got, want = self.answer(self.tokens[:1], **{name: neutral}), self.answer(self.tokens[:1])
        except Exception:
            return False
        return self._near(got, want)

    def _near(self, got: Tensor, want: Tensor) -> bool:
        return got.shape == want.shape and bool(((got - want).abs() <= self.tolerance * want.abs().max().clamp(min=1)).all())

    @cached_property
    def masks(self) -> bool:
        """Whether it takes attention_mask."""
        return self._takes("attention_mask", torch.ones(1, N, dtype=torch.long))

    @cached_property
    def places(self) -> bool:
        """Whether it takes position_ids."""
        return self._takes("position_ids", torch.arange(N)[None])

    @property
    def forgetting(self) -> dict[str, Any]:
        """Arguments that turn off a cache that is on by default: with a cache, positions do not separate documents."""
        return {"use_cache": False} if "use_cache" in self.arguments else {}

    @cached_property
    def documents(self) -> bool:
        """Whether positions that begin anew part documents: with a mask of ones beside them they would be positions only."""
        if not (self.masks and self.places):
            return False
        anew, ones = torch.cat([torch.arange(9), torch.arange(N - 9)])[None], torch.ones(1, N, dtype=torch.long)
        with torch.no_grad():
            parted = self.answer(self.tokens[:1], position_ids=anew, **self.forgetting)
            only = self.answer(self.tokens[:1], position_ids=anew, attention_mask=ones, **self.forgetting)
        return not self._near(parted, only)

    @cached_property
    def memory(self) -> Memory | None:
        """How it remembers, where it does."""
        flags = [name for name, p in self.arguments.items() if p.default is False]
        for asked in ({}, *({name: True} for name in flags), {"use_cache": True} if "use_cache" in self.arguments else {}):
            try:
                with torch.no_grad():
                    found = self._memory(asked)
            except Exception:
                continue
            if found is not None:
                return found
        return None

    def _memory(self, asked: Mapping[str, Any]) -> Memory | None:
        out = self.call(self.tokens[:1, :5], **asked)
        if isinstance(out, Mapping):  # what it gives by the name of an argument it takes
            named = (name for name, value in out.items() if name in self.arguments and value is not None)
            return next((Memory(asked, name, name) for name in named if name not in ("logits", "loss")), None)
        if not isinstance(out, (tuple, list)):
            return None
        for place, name in [(i, name) for i in range(1, len(out)) for name, p in self.arguments.items() if p.default is None]:
            with contextlib.suppress(Exception):
                later = self.answer(self.tokens[:1, 5:6], **asked, **{name: out[place]})
                if not torch.equal(later, self.answer(self.tokens[:1, 5:6], **asked)):
                    return Memory(asked, name, place)
                out = self.call(self.tokens[:1, :5], **asked)  # a memory that is written to in its place is used up
        return None

    @cached_property
    def mask_reaches(self) -> str | None:
        """With a memory, what a mask is about: "all" tokens so far, or the "new" ones; None where neither is taken."""
        memory = self.memory
        if memory is None or not self.masks:
            return None
        tokens = self.tokens[:1]

        def steps(begin: int | None) -> Tensor:
            out = self.call(tokens[:, :5], **memory.asked)
            for t in (5, 6):  # a mask that is taken wrongly may show in the memory alone
                mask = {} if begin is None else {"attention_mask": torch.ones(1, t + 1, dtype=torch.long)[:, begin * t :]}
                out = self.call(tokens[:, t : t + 1], **{**memory.asked, memory.argument: memory.of(out), **mask})
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
        """(…, n, numbers) equal to the tolerance of their scale. A gap is kept, and what else is compared goes on."""
        self.compared += 1
        if got.shape != want.shape:
            self.gaps.append(f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)}")
            return
        scale = max(want.abs().max().item(), 1.0)
        each = (got - want).abs().reshape(*got.shape[: min(got.dim() - 1, 2)], -1).amax(-1) / scale  # (n) or (rows, n)
        bad = (~(each <= (self.tolerance if tolerance is None else tolerance))).nonzero()
        if len(bad):
            where = [int(i) for i in bad[0]]
            row = f"row {where[0]}, " if len(where) == 2 else ""
            gap = each.nan_to_num(float("inf")).max().item()
            self.gaps.append(f"{what}: first differ at {row}position {where[-1]}, by {gap:.1e} of their scale at most")

    def true(self, holds: bool, what: str) -> None:
        """A plain fact."""
        self.compared += 1
        if not holds:
            self.gaps.append(what)

    def settle(self) -> None:
        """What did not hold is raised: the first gap in full, the others counted."""
        gaps, self.gaps = self.gaps, []
        if gaps:
            others = f" (and {len(gaps) - 1} more: {'; '.join(g.split(':')[0] for g in gaps[1:4])})" if gaps[1:] else ""
            raise Broken(gaps[0] + others)
