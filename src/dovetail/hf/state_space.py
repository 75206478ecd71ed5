"""State-space models: sizes given as a multiple or a fraction of the width, and the tensors of Mamba and Mamba-2 layers.

expand          <->  mixer.inner = expand · width
time_step_rank  <->  mixer.rank        "auto" is a sixteenth of the width, rounded up, as ours is
time_step_limit <->  mixer.dt_min, mixer.dt_max        their models clamp a whole pass and forget to in decoding; ours does both
"""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import CONCAT, DEPTHWISE
from dovetail.hf.field import ABSENT, Config, Field, Settings, integer, value_at
from dovetail.hf.table import Row
from dovetail.model.model import Model

WIDTH, TIME_STEP_LIMIT = "hidden_size", "time_step_limit"


class InnerWidth(Field):
    """The inner width as a multiple of the model's."""

    def __init__(self, name: str, path: str, *, also: str | None = None, default: int = 2) -> None:
        """`also` is the config field with the product."""
        self.name, self.path, self.also, self.default = name, path, also, default
        self.names = (name,) if also is None else (name, also)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        inner = value_at(spec, self.path)
        if not isinstance(inner, int) or inner % spec.width:
            return {}
        return {self.name: inner // spec.width, **({} if self.also is None else {self.also: inner})}

    def from_hf(self, config: Config) -> Settings:
        times, width = config.get(self.name, self.default), config.get(WIDTH)
        if not isinstance(times, (int, float)) or isinstance(times, bool) or not 0 < times < 1e6:
            raise SpecError(f"config.{self.name}", f"{times!r} is not a number above 0")
        if not isinstance(width, int):
            raise SpecError(f"config.{WIDTH}", f"{width!r} is not a whole number")
        inner, given = int(times * width), None if self.also is None else config.get(self.also)
        if given not in (None, inner):
            raise SpecError(f"config.{self.also}", f"{given!r} is unsupported", f"`{self.name}` implies {inner}")
        return {self.path: inner}


def mamba_heads(config: Config, inner: int) -> int:
    """The size of Mamba-2's heads, which fill the inner width; `auto` is the size that does."""
    count, head = integer(config, "mamba_n_heads", 128, 1), config.get("mamba_d_head", "auto")
    head = inner // count if head == "auto" else head
    if not isinstance(head, int) or head * count != inner:
        raise SpecError("config.mamba_d_head", f"{count} heads of {head!r} do not fill the inner width, {inner}")
    return head


class TimeStepRank(Field):
    """The rank of the projection to the time step."""

    def __init__(self, name: str, path: str) -> None:
        self.names, self.path = (name,), path

    def to_hf(self, spec: Model) -> dict[str, Any]:
        rank = value_at(spec, self.path)
        return {} if rank is ABSENT else {self.names[0]: rank}

    def from_hf(self, config: Config) -> Settings:
        rank = config.get(self.names[0], "auto")
        return {self.path: None if rank == "auto" else rank}


class TimeStepLimit(Field):
    """The least and the greatest time step of Mamba-2; an infinite one is none."""

    names = (TIME_STEP_LIMIT,)

    def __init__(self, path: str) -> None:
        self.least, self.greatest = f"{path}.dt_min", f"{path}.dt_max"

    def to_hf(self, spec: Model) -> dict[str, Any]:
        least, greatest = value_at(spec, self.least), value_at(spec, self.greatest)
        if least is ABSENT or (least, greatest) == (0.0, None):
            return {}  # their default
        return {TIME_STEP_LIMIT: [least, float("inf") if greatest is None else greatest]}

    def from_hf(self, config: Config) -> Settings:
        given = config.get(TIME_STEP_LIMIT)
        if given is None:
            return {self.least: 0.0, self.greatest: None}
        both = [_number(one) for one in given] if isinstance(given, (list, tuple)) else []
        if len(both) != 2 or None in both:
            raise SpecError(f"config.{TIME_STEP_LIMIT}", f"{given!r} is not a pair of numbers")
        least, greatest = both
        return {self.least: least, self.greatest: None if greatest == float("inf") else greatest}


def _number(value: Any) -> float | None:
    """A number of a config, which writes an infinite one in words; None for anything else."""
    value = value.get("__float__") if isinstance(value, dict) else value
    if value == "Infinity":
        return float("inf")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class GatedNorm(Field):
    """The norm of Mamba-2: within each group of heads, before the gate or after it, or none (Falcon-H1)."""

    names = ("mamba_rms_norm", "mamba_norm_before_gate", "mamba_n_groups")

    def __init__(self, path: str, default: Any) -> None:
        """`default` is the plain data of the norm, but for its groups."""
        self.path, self.default = path, default

    def to_hf(self, spec: Model) -> dict[str, Any]:
        norm, before, groups = (value_at(spec, f"{self.path}.{name}") for name in ("norm", "norm_before_gate", "groups"))
        return dict(zip(self.names, (norm is not None, before, groups), strict=True))

    def from_hf(self, config: Config) -> Settings:
        groups = config.get("mamba_n_groups", 1)
        normed, before = (config.get(name) for name in self.names[:2])
        norm = {**self.default, "groups": groups} if normed else None
        before = True if before is None else before
        settings = {"norm": norm, "norm_before_gate": before if normed else False, "groups": groups}
        return {f"{self.path}.{name}": value for name, value in settings.items()}


def mamba_rows(hf_module: str, module: str) -> tuple[Row, ...]:
    """Rows of one Mamba layer: x and z in one matrix; Δ, B and C in another."""

    def packed(name: str, *leaves: str) -> Row:
        return Row(f"{hf_module}.{name}", *(f"{module}.{leaf}" for leaf in leaves), convert=CONCAT)

    return (
        packed("in_proj.weight", "x.weight", "z.weight"),
        packed("in_proj.bias", "x.bias", "z.bias"),
        packed("x_proj.weight", "low.weight", "b.weight", "c.weight"),
        Row(f"{hf_module}.dt_proj.weight", f"{module}.dt.weight"),
        Row(f"{hf_module}.dt_proj.bias", f"{module}.dt_bias"),
        Row(f"{hf_module}.conv1d.weight", f"{module}.conv", convert=DEPTHWISE),
        Row(f"{hf_module}.conv1d.bias", f"{module}.conv_bias"),
        Row(f"{hf_module}.A_log", f"{module}.a_log"),
        Row(f"{hf_module}.D", f"{module}.skip"),
        Row(f"{hf_module}.out_proj.weight", f"{module}.o.weight", where=f"{module}:mamba"),
        Row(f"{hf_module}.out_proj.bias", f"{module}.o.bias", where=f"{module}:mamba"),
    )


def mamba2_rows(hf_module: str, module: str) -> tuple[Row, ...]:
    """Rows of one Mamba-2 layer: z, x, B, C and Δ in one matrix; x, B and C in one convolution."""
    projections = (f"{module}.{name}.weight" for name in ("z", "x", "b", "c", "dt"))
    return (
        Row(f"{hf_module}.in_proj.weight", *projections, convert=CONCAT),
        Row(f"{hf_module}.conv1d.weight", *(f"{module}.conv_{name}" for name in "xbc"), convert=CONCAT.then(DEPTHWISE)),
        Row(f"{hf_module}.conv1d.bias", *(f"{module}.conv_{name}_bias" for name in "xbc"), convert=CONCAT),
        Row(f"{hf_module}.dt_bias", f"{module}.dt_bias"),
        Row(f"{hf_module}.A_log", f"{module}.a_log"),
        Row(f"{hf_module}.D", f"{module}.skip"),
        Row(f"{hf_module}.norm.weight", f"{module}.norm.scale", where=f"{module}:mamba2"),
        Row(f"{hf_module}.out_proj.weight", f"{module}.o.weight", where=f"{module}:mamba2"),
    )
