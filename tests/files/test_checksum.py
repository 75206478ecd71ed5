"""The hash of plain data is a function of the data: not of the order of its keys, and different for different data."""

from __future__ import annotations

import json

from hypothesis import given, settings, strategies as st

from dovetail.disk.shape import data_sha256

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


def reordered(value: object) -> object:
    """The same data with the keys of every mapping in the opposite order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(one) for one in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text("ab", max_size=2), VALUES, max_size=4), st.dictionaries(st.text("ab", max_size=2), VALUES))
@settings(max_examples=200, deadline=None)
def test_equal_data_have_one_hash_and_other_data_another(data: dict[str, object], other: dict[str, object]) -> None:
    again = reordered(data)
    assert isinstance(again, dict)
    assert data_sha256(again) == data_sha256(data)
    same = json.dumps(data, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (data_sha256(other) == data_sha256(data)) == same
