"""EngineOptions: how the native engine runs a model, as plain data, without torch."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Annotated, Literal

from dovetail.api.options import BUDGET, COMPILED, EVICT, EVICT_TO, LONGEST, POOLING, ROWS, SERVED_DTYPE, SHARE, SPECULATE
from dovetail.base.keywords import checks_keywords
from dovetail.base.option import Option
from dovetail.base.option_group import OptionGroup


@checks_keywords
@dc.dataclass(frozen=True)
class EngineOptions(OptionGroup):
    """How a model directory is served, as plain data: a server's process hands it to the process of its engine."""

    rows: Annotated[int, ROWS] = 8
    longest: Annotated[int, LONGEST] = 4096
    budget: Annotated[int, BUDGET] = 512
    pages: Annotated[
        int | None, Option("Pages of 8 tokens in the KV cache; by default enough for all rows.", low=1, high=1 << 24)
    ] = None
    cache: Annotated[Literal["int8", "int4", "fp8"] | None, Option("Store the KV cache in fewer bits.")] = None
    evict: Annotated[Literal["oldest", "attended", "sinks"] | None, EVICT] = None
    evict_to: Annotated[int | None, EVICT_TO] = None
    share: Annotated[bool, SHARE] = True
    speculate: Annotated[str | None, SPECULATE] = None
    drafts: Annotated[
        int,
        Option("With --speculate: tokens guessed at once; by depths or Medusa heads at most one each.", low=1, high=64),
    ] = 4
    compiled: Annotated[bool, COMPILED] = False
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, SERVED_DTYPE] = None
    threads: Annotated[int | None, Option("Threads of the engine on a CPU.", low=1, high=1024)] = None
    pooling: Annotated[Literal["mean", "last", "cls"] | None, POOLING] = None
    adapters: Mapping[str, str] = dc.field(default_factory=dict[str, str])  # directories by the names that requests give
