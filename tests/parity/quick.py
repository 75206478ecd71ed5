"""Families for tests that go through every field of each: the quick run tries one in three, `slow` the others."""

from __future__ import annotations

import pytest

from dovetail.hf.dialect import DIALECTS

FAMILIES = [name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(sorted(DIALECTS))]
DEEPER = {"gpt_neo": 24}  # layers of a default config: its default layer types are those of 24 layers
