"""What several swaps drop is what each drops of the spec that it meets, whatever their order."""

from __future__ import annotations

import itertools

import pytest

from dovetail.files.spec import changed, load_spec, swap_losses

SWAPS = ("mixer=mla", "mixer=mamba", "mixer={kind: attention, heads: 4}", "position=alibi", "ffn=mlp")


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny", "jamba-tiny"])
def test_each_swap_is_compared_with_the_spec_that_it_meets(name: str) -> None:
    spec, differs = load_spec(name), 0
    for swaps in itertools.permutations(SWAPS, 2):
        first, second = swaps
        of_second = swap_losses(changed(spec, swaps=[first]), [second])
        assert swap_losses(spec, swaps) == list(dict.fromkeys(swap_losses(spec, [first]) + of_second)), swaps
        differs += of_second != swap_losses(spec, [second])
    assert differs, "no swap changes what another one drops"
