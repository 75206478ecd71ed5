"""State spaces in their words: sizes that are a multiple or a share of the width, and the tensors of a Mamba layer.

expand          <->  mixer.inner = expand · width
time_step_rank  <->  mixer.rank        "auto" is a sixteenth of the width, rounded up, as ours is
"""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.convert import CHANNELS, STACK
from dovetail.port.table import ABSENT, Config, Row, Settings, look

WIDTH = "hidden_size"


class Expand:
    """The inner width as a multiple of the stream's."""

    def __init__(self, theirs: str, ours: str, *, also: str | None = None, usual: int = 2) -> None:
        """`also` is a field of theirs that holds the product."""
        self.theirs, self.ours, self.also, self.usual = theirs, ours, also, usual
        self.names = (theirs,) if also is None else (theirs, also)

    def give(self, spec: Model) -> dict[str, Any]:
        inner = look(spec, self.ours)
        if not isinstance(inner, int) or inner % spec.width:
            return {}
        return {self.theirs: inner // spec.width, **({} if self.also is None else {self.also: inner})}

    def take(self, config: Config) -> Settings:
        times, width = config.get(self.theirs, self.usual), config.get(WIDTH)
        if not isinstance(times, (int, float)) or isinstance(times, bool) or not 0 < times < 1e6:
            raise SpecError(f"config.{self.theirs}", f"{times!r} is not a number above 0")
        if not isinstance(width, int):
            raise SpecError(f"config.{WIDTH}", f"{width!r} is not a whole number")
        inner, said = int(times * width), None if self.also is None else config.get(self.also)
        if said not in (None, inner):
            raise SpecError(f"config.{self.also}", f"{said!r} is unsupported", f"`{self.theirs}` implies {inner}")
        return {self.ours: inner}


class Rank:
    """The rank of the step width's projection."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.names, self.ours = (theirs,), ours

    def give(self, spec: Model) -> dict[str, Any]:
        rank = look(spec, self.ours)
        return {} if rank is ABSENT else {self.names[0]: rank}

    def take(self, config: Config) -> Settings:
        rank = config.get(self.names[0], "auto")
        return {self.ours: None if rank == "auto" else rank}


def selective(theirs: str, ours: str) -> tuple[Row, ...]:
    """Rows of one Mamba: x and z in one matrix, what a token chooses by in another."""

    def packed(name: str, *mine: str) -> Row:
        return Row(f"{theirs}.{name}", *(f"{ours}.{one}" for one in mine), convert=STACK)

    return (
        packed("in_proj.weight", "x.weight", "z.weight"),
        packed("in_proj.bias", "x.bias", "z.bias"),
        packed("x_proj.weight", "low.weight", "b.weight", "c.weight"),
        Row(f"{theirs}.dt_proj.weight", f"{ours}.dt.weight"),
        Row(f"{theirs}.dt_proj.bias", f"{ours}.dt_bias"),
        Row(f"{theirs}.conv1d.weight", f"{ours}.conv", convert=CHANNELS),
        Row(f"{theirs}.conv1d.bias", f"{ours}.conv_bias"),
        Row(f"{theirs}.A_log", f"{ours}.a_log"),
        Row(f"{theirs}.D", f"{ours}.skip"),
        Row(f"{theirs}.out_proj.weight", f"{ours}.o.weight", where=f"{ours}:mamba"),
        Row(f"{theirs}.out_proj.bias", f"{ours}.o.bias", where=f"{ours}:mamba"),
    )
