"""Mixers mix tokens: x (…, n, embed) -> like x. Cross mixers mix the encoder output into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.base.errors import SpecError
from dovetail.nn.groups.mask import Order
from dovetail.spec.part import KINDS, Part


class Mixer(Part):
    """Mixes tokens: attention, a state-space model, an RNN. Module: forward(x, ctx, view=None) -> like x."""

    group: ClassVar[str] = "mixer"
    recurrent: ClassVar[bool] = False  # whether earlier tokens reach later ones through a recurrent state alone
    # whether it reads its entries by `KV.attend` alone, with the scoring of its module, so that an engine may keep them to
    # itself (nn/view.py)
    attends: ClassVar[bool] = False
    # the tap of the values: those that its pattern weighs; of a recurrent mixer, those that its tap `y` is linear in where the
    # other taps are given. Empty: there is none
    values: ClassVar[str] = ""

    def order(self) -> Order:
        """Whether an output depends on later tokens."""
        return "causal"

    def ahead(self) -> int | None:
        """The number of first tokens that see each other; behind them no query sees a later key. None: some do anywhere."""
        return 0 if self.order() == "causal" else None

    def reads_encoder(self) -> bool:
        """Whether it attends to the encoder output."""
        return False

    def starts_from_encoder(self) -> bool:
        """Whether its recurrent state starts from the encoder output: its module then has a `fill`, as cross attention has."""
        return False


class CrossMixer(Mixer):
    """Mixes the encoder output into the tokens, in the field `cross` of a block, which may name it by the mixer that does the
    same with the tokens themselves: `cross: attention`. Module: a CrossModule (nn/softmax.py)."""

    own: ClassVar[str] = ""  # the kind of that mixer

    def order(self) -> Order:
        return "causal"

    def reads_encoder(self) -> bool:
        return True

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
        data = super().from_short_form(data)
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if kind not in KINDS or not issubclass(KINDS[kind], Mixer) or issubclass(KINDS[kind], CrossMixer):
            return data
        crosses = {known.own: name for name, known in KINDS.items() if issubclass(known, CrossMixer)}
        if kind not in crosses:
            raise SpecError("", f"{kind} does not read an encoder output", f"kinds: {', '.join(sorted(crosses.values()))}")
        return {**data, "kind": crosses[kind]}
