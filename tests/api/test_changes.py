"""Changes of a spec mean the same in every form, also in one that can be read only once."""

from __future__ import annotations

from typing import Any

import pytest

import dovetail as dt

SET, SWAP = ["layers.*.ffn.hidden=64", "layers.*.mixer.heads=8"], ["norm=layernorm", "mixer=mla"]


def once(changes: list[str]) -> Any:
    """An iterator over them."""
    return (change for change in changes)


@pytest.mark.parametrize("verb", ["show", "plan", "diff"])
def test_changes_of_an_iterator_are_applied(verb: str) -> None:
    calls: dict[str, Any] = {
        "show": lambda set, swap: dt.show("llama-tiny", set=set, swap=swap),
        "plan": lambda set, swap: dt.plan("llama-tiny", gpus=1, set=set, swap=swap),
        "diff": lambda set, swap: dt.diff("llama-tiny", "llama-tiny", set=set, swap=swap),
    }
    want, unchanged = (calls[verb](*changes).to_dict() for changes in ((SET, SWAP), ((), ())))
    assert calls[verb](once(SET), once(SWAP)).to_dict() == want != unchanged
