"""Every golden equals the present result: numbers to 1e-9, tokens, bytes and accounts exactly."""

from __future__ import annotations

import pytest
from golden import compute, specs, stored

SPECS = specs()
WANT = stored()


def test_every_spec_has_a_golden():
    assert set(SPECS) == set(WANT)


@pytest.mark.parametrize("name", sorted(WANT))
def test_golden(name):
    want, got = dict(WANT[name]), compute(SPECS[name])
    for key in ("some_logits", "loss"):
        if key in want:
            assert got.pop(key) == pytest.approx(want.pop(key), rel=1e-9, abs=1e-9), key
    del want["logits"], got["logits"]  # bits: `python tests/goldens/golden.py`
    assert got == want
