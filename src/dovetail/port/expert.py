"""Experts in their words: the loss that balances them, and which layers have them.

    router_aux_loss_coef    <->    router.balance_loss

Theirs is one loss over the choices of all layers together, ours one in each layer: the weight of it travels, the number it
gives differs. Files hold one matrix an expert.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.table import ABSENT, Config, Row, Settings, is_kind, look

WEIGHT, USUAL_WEIGHT = "router_aux_loss_coef", 0.001
DENSE, STEP = "mlp_only_layers", "decoder_sparse_step"


class BalanceLoss:
    """How much the balance of experts counts in training; nothing where every token meets every expert."""

    names = (WEIGHT, "output_router_logits")  # the second asks for an output, not for a loss

    def __init__(self, ours: str, *experts: str) -> None:
        """`experts`: names of their field that counts them."""
        self.ours, self.experts = ours, experts

    def give(self, spec: Model) -> dict[str, Any]:
        weight = look(spec, self.ours)
        return {} if weight is ABSENT else {WEIGHT: weight}

    def take(self, config: Config) -> Settings:
        all_met = config.get("num_experts_per_tok") in [config[name] for name in self.experts if name in config]
        return {self.ours: 0.0 if all_met else config.get(WEIGHT, USUAL_WEIGHT)}


def bank(
    theirs: str, ours: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, Row, Row]:
    """Rows for the matrices of gated experts; `theirs` holds `{expert}`."""
    return (
        Row(f"{theirs}.{gate}.weight", f"{ours}.gate"),
        Row(f"{theirs}.{up}.weight", f"{ours}.up"),
        Row(f"{theirs}.{down}.weight", f"{ours}.down"),
    )


def glu(theirs: str, ours: str) -> tuple[Row, Row, Row]:
    """Rows for a gated ffn without biases."""
    return (
        Row(f"{theirs}.gate_proj.weight", f"{ours}.gate.weight"),
        Row(f"{theirs}.up_proj.weight", f"{ours}.up.weight"),
        Row(f"{theirs}.down_proj.weight", f"{ours}.down.weight"),
    )


def counted(config: Config, field: str) -> int:
    """How many layers a config has; 0 where it says nothing sensible, which is an error where layers are counted."""
    count = config.get(field)
    return min(count, 10_000) if isinstance(count, int) and not isinstance(count, bool) else 0


def whole(config: Config, field: str, usual: int, least: int = 0) -> int:
    """A whole number of a config that layers are chosen by."""
    value = config.get(field)
    if value is None:
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"config.{field}", f"{value!r} is not a whole number from {least} on")
    return value


class SparseLayers:
    """Layers with one plain ffn among layers with experts: those of a list, and all but every so many."""

    names = (DENSE, STEP)

    def __init__(self, layers: str, plain: str = "glu") -> None:
        self.layers, self.plain = layers, plain

    def give(self, spec: Model) -> dict[str, Any]:
        return {DENSE: [i for i, block in enumerate(spec.layers) if is_kind(look(block, "ffn"), self.plain)], STEP: 1}

    def take(self, config: Config) -> Settings:
        listed, step = config.get(DENSE) or [], whole(config, STEP, 1, 1)
        if not isinstance(listed, (list, tuple)) or not all(isinstance(i, int) for i in listed):
            raise SpecError(f"config.{DENSE}", f"{listed!r} is not a list of numbers of layers")
        layers = range(counted(config, self.layers))
        return {f"layers.{i}.ffn": self.plain for i in layers if i in listed or (i + 1) % step}


class FirstDense:
    """The first so many layers have one plain ffn, the others experts."""

    def __init__(self, theirs: str, layers: str, usual: int, plain: str = "glu") -> None:
        self.names, self.layers, self.usual, self.plain = (theirs,), layers, usual, plain

    def give(self, spec: Model) -> dict[str, Any]:
        kinds = [is_kind(look(block, "ffn"), self.plain) for block in spec.layers]
        return {self.names[0]: kinds.index(False) if False in kinds else len(kinds)}

    def take(self, config: Config) -> Settings:
        first = whole(config, self.names[0], self.usual)
        return {f"layers.{i}.ffn": self.plain for i in range(min(first, counted(config, self.layers)))}


class Periodic:
    """Every so many layers another part stands: layer i where i % period == offset."""

    def __init__(self, period: str, offset: str, layers: str, ours: str, data: Any, *, usual: tuple[int, int]) -> None:
        """`ours` is the field of a layer, `data` the plain data of what stands there then."""
        self.period, self.offset, self.layers, self.ours, self.data, self.usual = period, offset, layers, ours, data, usual
        self.names: tuple[str, ...] = (period, offset)

    def give(self, spec: Model) -> dict[str, Any]:
        there = [is_kind(look(block, self.ours), self.data["kind"]) for block in spec.layers]
        layers = [i for i, found in enumerate(there) if found]
        offset = layers[0] if layers else len(there)  # a period longer than the model: no layer has the part
        period = layers[1] - offset if len(layers) > 1 else max(offset + 1, len(there) - offset)
        fits = offset < period and layers == list(range(offset, len(there), period))
        return {self.period: period, self.offset: offset} if fits else {}

    def take(self, config: Config) -> Settings:
        period = whole(config, self.period, self.usual[0], 1)
        offset = whole(config, self.offset, self.usual[1])
        if offset >= period:
            raise SpecError(f"config.{self.offset}", f"{offset} is not below the period, {period}")
        return {f"layers.{i}.{self.ours}": self.data for i in range(offset, counted(config, self.layers), period)}


class Shared:
    """Experts that every token meets, counted there as so many of the size of the others, here one ffn as wide as all."""

    def __init__(self, theirs: str, size: str, ours: str, others: str) -> None:
        self.names, self.size, self.ours, self.others = (theirs,), size, ours, others

    def give(self, spec: Model) -> dict[str, Any]:
        together, each = look(spec, self.ours), look(spec, self.others)
        if ABSENT in (together, each) or together % each:
            return {}
        return {self.names[0]: together // each}

    def take(self, config: Config) -> Settings:
        count, size = whole(config, self.names[0], 1, 1), whole(config, self.size, 1, 1)
        return {self.ours: count * size}


class Groups:
    """Groups of experts, of which the best are chosen from; where all of them are, there are none."""

    names = ("n_group", "topk_group")

    def __init__(self, router: str) -> None:
        self.router = router

    def give(self, spec: Model) -> dict[str, Any]:
        groups, best = look(spec, f"{self.router}.groups"), look(spec, f"{self.router}.top_groups")
        return {} if groups is ABSENT else {"n_group": groups, "topk_group": best}

    def take(self, config: Config) -> Settings:
        groups, best = whole(config, "n_group", 8, 1), whole(config, "topk_group", 4, 1)
        limits = best < groups
        return {f"{self.router}.groups": groups if limits else 1, f"{self.router}.top_groups": best if limits else 1}
