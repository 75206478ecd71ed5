"""Families that the quick run tries where a test goes through every field of each: one in three; `slow` tries the others."""

from __future__ import annotations

import pytest

from dovetail.port.dialect import DIALECTS

FAMILIES = [name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(sorted(DIALECTS))]
