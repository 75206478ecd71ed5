"""Print the parts, shapes and costs of a model: parameters, FLOPs per token, decode state, and advice.

The figures are computed from the spec and no weight is allocated, so a model of 405 billion parameters takes no longer than a
small one. --html writes the model as a foldable block diagram.

    dovetail show llama-3-70b --length 4096
    dovetail show llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi --html llama-tiny.html
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.options import SET, SPEC, SWAP, Dtype, Length
from dovetail.api.result import Result
from dovetail.views.blocks import View
from dovetail.views.page import Page

if TYPE_CHECKING:
    from dovetail.account import Account
    from dovetail.model.model import Model
    from dovetail.views.summary import Limit


@dc.dataclass(frozen=True, repr=False)
class Summary(Result):
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

    def view(self, width: int) -> View:
        from dovetail.views.summary import summary_view

        return summary_view(self.name, self.account, self.limit, width, self.not_carried_over)

    def page(self) -> Page:
        from dovetail.views.diagram import diagram

        return Page(f"dovetail show {self.name}", diagram(self.name, self.account, self.limit, self.not_carried_over))


def show(
    spec: Annotated[SpecLike, SPEC],
    *,
    length: Annotated[
        int | None, Length("Tokens per sequence (default: 2048, or the longest sequence of the model if that is shorter).")
    ] = None,
    dtype: Annotated[
        str | None,
        Dtype("The dtype of weights and decode state (default: that of the checkpoint's files, or bf16 without files)."),
    ] = None,
    set: Annotated[Changes, SET] = (),
    swap: Annotated[Changes, SWAP] = (),
) -> Summary:
    """Return the parts, parameters, FLOPs per token and decode state of a model. No weight is allocated.

    `length` is the number of tokens per sequence: by default 2048, or the longest sequence of the model if that is shorter.
    `dtype` is that of weights and decode state: by default the dtype of the checkpoint's files, or bf16 without files.
    """
    from dovetail.account import account
    from dovetail.files.spec import listed, swap_losses

    before, set, swap = read_spec(spec), listed(set), listed(swap)
    name, changed, directory = before.after(set, swap)
    costs = account(changed, length, dtype or _stored(directory))
    limit = _limit(changed, directory)
    if length is None and limit is not None and limit.tokens < costs.length:
        costs = dc.replace(costs, length=limit.tokens)
    return Summary(name, costs, limit, tuple(swap_losses(before.spec, swap)))


def _limit(spec: Model, directory: Path | None) -> Limit | None:
    """Return the longest sequence: the rows of a position table, or the context length that the config states."""
    from dovetail.account import longest_length
    from dovetail.hf.files import context_length
    from dovetail.views.summary import Limit

    longest = longest_length(spec)
    if longest is not None:
        return Limit(longest, "positions of the model")
    context = None if directory is None else context_length(directory)
    return None if context is None else Limit(context.tokens, f"{context.field} of the config")


def _stored(directory: Path | None) -> str:
    from dovetail.account import DTYPES
    from dovetail.hf.files import stored_dtype

    stored = None if directory is None else stored_dtype(directory)
    names = [name for name, dtype in DTYPES.items() if dtype == stored]
    return names[0] if names else "bf16"
