"""Mixture of experts: the load-balancing loss, and which layers have experts.

    router_aux_loss_coef    <->    router.balance_loss

Their loss is one over the routing of all layers total, ours is one per layer: the coefficient is carried over, the value
of the loss differs. Files hold one matrix per expert.
"""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.field import ABSENT, Config, Copy, Field, Settings, depth_of, integer, is_kind, value_at
from dovetail.hf.table import Row
from dovetail.model.model import Model

WEIGHT, DEFAULT_WEIGHT = "router_aux_loss_coef", 0.001
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the parameters of all experts in a module of transformers
DENSE, STEP = "mlp_only_layers", "decoder_sparse_step"


class BalanceLoss(Field):
    """The coefficient of the load-balancing loss; 0 where every token is routed to every expert."""

    names = (WEIGHT, "output_router_logits")  # the second asks for an output, not for a loss

    def __init__(self, path: str, experts: str) -> None:
        """`experts`: the config field with the number of experts."""
        self.path, self.experts = path, experts

    def to_hf(self, spec: Model) -> dict[str, Any]:
        weight = value_at(spec, self.path)
        return {} if weight is ABSENT else {WEIGHT: weight}

    def from_hf(self, config: Config) -> Settings:
        all_chosen = config.get("num_experts_per_tok") == config.get(self.experts, ABSENT)
        return {self.path: 0.0 if all_chosen else config.get(WEIGHT, DEFAULT_WEIGHT)}


def expert_fields(experts: str) -> tuple[Copy, ...]:
    """The fields of a config with `num_experts`; `experts` is the path of the experts."""
    return (
        Copy("num_experts", f"{experts}.experts"),
        Copy("num_experts_per_tok", f"{experts}.router.top_k"),
        Copy("norm_topk_prob", f"{experts}.router.normalize"),
        Copy("moe_intermediate_size", f"{experts}.hidden"),
    )


def expert_rows(
    hf_module: str,
    module: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    fused: str | None = None,
) -> tuple[Row, Row, Row]:
    """Rows for the matrices of gated experts; `hf_module` has `{expert}`. `fused` is the module of transformers with all of
    them, where it is not `hf_module` without the number."""
    whole = fused or hf_module.removesuffix(".{expert}")
    return (
        Row(f"{hf_module}.{gate}.weight", f"{module}.gate.weight", fused=f"{whole}.{GATE_UP}"),
        Row(f"{hf_module}.{up}.weight", f"{module}.up.weight", fused=f"{whole}.{GATE_UP}"),
        Row(f"{hf_module}.{down}.weight", f"{module}.down.weight", fused=f"{whole}.{DOWN}"),
    )


def glu_rows(hf_module: str, module: str) -> tuple[Row, Row, Row]:
    """Rows for a gated FFN without biases."""
    return (
        Row(f"{hf_module}.gate_proj.weight", f"{module}.gate.weight"),
        Row(f"{hf_module}.up_proj.weight", f"{module}.up.weight"),
        Row(f"{hf_module}.down_proj.weight", f"{module}.down.weight"),
    )


class SparseLayers(Field):
    """Dense layers among MoE layers: those of a list, and those that `decoder_sparse_step` leaves out."""

    names = (DENSE, STEP)

    def __init__(self, layers: str, plain: str = "glu") -> None:
        self.layers, self.plain = layers, plain

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {DENSE: [i for i, block in enumerate(spec.layers) if is_kind(value_at(block, "ffn"), self.plain)], STEP: 1}

    def from_hf(self, config: Config) -> Settings:
        listed, step = config.get(DENSE) or [], integer(config, STEP, 1, 1)
        if not isinstance(listed, (list, tuple)) or not all(isinstance(i, int) for i in listed):
            raise SpecError(f"config.{DENSE}", f"{listed!r} is not a list of numbers of layers")
        layers = range(depth_of(config, self.layers))
        return {f"layers.{i}.ffn": self.plain for i in layers if i in listed or (i + 1) % step}


class FirstDense(Field):
    """The first layers are dense, the others have experts."""

    def __init__(self, name: str, layers: str, default: int, plain: str = "glu") -> None:
        self.names, self.layers, self.default, self.plain = (name,), layers, default, plain

    def to_hf(self, spec: Model) -> dict[str, Any]:
        kinds = [is_kind(value_at(block, "ffn"), self.plain) for block in spec.layers]
        return {self.names[0]: kinds.index(False) if False in kinds else len(kinds)}

    def from_hf(self, config: Config) -> Settings:
        first = integer(config, self.names[0], self.default)
        return {f"layers.{i}.ffn": self.plain for i in range(min(first, depth_of(config, self.layers)))}


class PeriodicLayers(Field):
    """Another part in every layer i with i % period == offset."""

    def __init__(self, period: str, offset: str, layers: str, part: str, data: Any, *, default: tuple[int, int]) -> None:
        """`part` is the field of a layer, `data` the plain data of its part in these layers."""
        self.period, self.offset, self.layers, self.part, self.data, self.default = period, offset, layers, part, data, default
        self.names: tuple[str, ...] = (period, offset)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        there = [is_kind(value_at(block, self.part), self.data["kind"]) for block in spec.layers]
        layers = [i for i, found in enumerate(there) if found]
        offset = layers[0] if layers else len(there)  # a period longer than the model: no layer has the part
        period = layers[1] - offset if len(layers) > 1 else max(offset + 1, len(there) - offset)
        fits = offset < period and layers == list(range(offset, len(there), period))
        return {self.period: period, self.offset: offset} if fits else {}

    def from_hf(self, config: Config) -> Settings:
        period = integer(config, self.period, self.default[0], 1)
        offset = integer(config, self.offset, self.default[1])
        if offset >= period:
            raise SpecError(f"config.{self.offset}", f"{offset} is not below the period, {period}")
        return {f"layers.{i}.{self.part}": self.data for i in range(offset, depth_of(config, self.layers), period)}


class SharedExperts(Field):
    """Shared experts: a config counts them in the size of the routed ones; here they are one FFN as wide as all of them."""

    def __init__(self, name: str, size: str, path: str, routed: str) -> None:
        self.names, self.size, self.path, self.routed = (name,), size, path, routed

    def to_hf(self, spec: Model) -> dict[str, Any]:
        total, each = value_at(spec, self.path), value_at(spec, self.routed)
        if ABSENT in (total, each) or total % each:
            return {}
        return {self.names[0]: total // each}

    def from_hf(self, config: Config) -> Settings:
        count, size = integer(config, self.names[0], 1, 1), integer(config, self.size, 1, 1)
        return {self.path: count * size}


class ExpertGroups(Field):
    """Groups of experts: experts are chosen from the best groups. Without a limit on groups there is one group."""

    names = ("n_group", "topk_group")

    def __init__(self, router: str) -> None:
        self.router = router

    def to_hf(self, spec: Model) -> dict[str, Any]:
        groups, best = value_at(spec, f"{self.router}.groups"), value_at(spec, f"{self.router}.top_groups")
        return {} if groups is ABSENT else {"n_group": groups, "topk_group": best}

    def from_hf(self, config: Config) -> Settings:
        groups, best = integer(config, "n_group", 8, 1), integer(config, "topk_group", 4, 1)
        limits = best < groups
        return {f"{self.router}.groups": groups if limits else 1, f"{self.router}.top_groups": best if limits else 1}
