"""show: the parts, parameters, FLOPs and decode state of a model, computed from its spec."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.account import DTYPES, Account, account, longest_length
from dovetail.api.arguments import SpecLike, read_spec
from dovetail.api.result import PageResult
from dovetail.core.errors import SpecError
from dovetail.core.limits import MAX_LENGTH
from dovetail.files.spec import Changes, swap_losses
from dovetail.hf.files import context_length, stored_dtype
from dovetail.model import Model
from dovetail.views.diagram import diagram
from dovetail.views.summary import Limit, summary_view


@dc.dataclass(frozen=True, repr=False)
class Summary(PageResult):
    """The parts and costs of a model."""

    name: str
    account: Account
    limit: Limit | None  # the longest sequence
    not_carried_over: tuple[str, ...] = ()  # fields that a swap dropped, in words

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied weight counts once."""
        return self.account.tree.parameters

    def to_dict(self) -> dict[str, Any]:
        lost = {"not_carried_over": list(self.not_carried_over)} if self.not_carried_over else {}
        longest = None if self.limit is None else self.limit.tokens
        return {"spec": self.name, **self.account.to_dict(), "max_length": longest, **lost}

    def view(self, width: int) -> RenderableType:
        return summary_view(self.name, self.account, self.limit, width, self.not_carried_over)

    @property
    def title(self) -> str:
        return f"dovetail show {self.name}"

    def body(self) -> str:
        return diagram(self.name, self.account, self.limit, self.not_carried_over)


def show(
    spec: SpecLike, *, length: int | None = None, dtype: str | None = None, set: Changes = (), swap: Changes = ()
) -> Summary:
    """Return the parts, parameters, FLOPs per token and decode state of a model. No weight is allocated.

    `length` is the number of tokens per sequence: by default 2048, or the longest sequence of the model if that is shorter.
    `dtype` is that of weights and decode state: by default the dtype of the checkpoint's files, or bf16 without files.
    """
    if length is not None and not 1 <= length <= MAX_LENGTH:
        raise SpecError("--length", f"{length} is not a number of tokens from 1 to {MAX_LENGTH}")
    before = read_spec(spec)
    name, changed, directory = before.after(set, swap)
    costs = account(changed, length, dtype or _stored(directory))
    limit = _limit(changed, directory)
    if length is None and limit is not None and limit.tokens < costs.length:
        costs = dc.replace(costs, length=limit.tokens)
    return Summary(name, costs, limit, tuple(swap_losses(before.spec, swap)))


def _limit(spec: Model, directory: Path | None) -> Limit | None:
    """Return the longest sequence: the rows of a position table, or the context length that the config states."""
    longest = longest_length(spec)
    if longest is not None:
        return Limit(longest, "positions of the model")
    context = None if directory is None else context_length(directory)
    return None if context is None else Limit(context.tokens, f"{context.field} of the config")


def _stored(directory: Path | None) -> str:
    stored = None if directory is None else stored_dtype(directory)
    names = [name for name, dtype in DTYPES.items() if dtype == stored]
    return names[0] if names else "bf16"
