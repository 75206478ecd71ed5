import pytest
import torch

from dovetail.build import build
from dovetail.core.at import At
from dovetail.core.ctx import Ctx
from dovetail.train.sample import pick, write

PROMPT = torch.tensor([5, 17, 3, 60])


@pytest.fixture
def model(tiny, lively):
    return lively(build(tiny.replace("head.tied", False)))


@torch.no_grad()
def test_written_with_a_memory_equals_read_whole_each_time(model):
    written = write(model, PROMPT, 12, temperature=0)
    text = PROMPT
    for token in written:
        logits = model(text[None], Ctx(at=At.whole(1, len(text))))[0, -1]
        assert token == logits.argmax()
        text = torch.cat([text, token[None]])
    assert len(set(written.tolist())) > 3


def test_a_seed_writes_the_same_again(model):
    one, two, other = (write(model, PROMPT, 20, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(write(model, PROMPT, 20, temperature=2.0, top=1), write(model, PROMPT, 20, temperature=0))
    assert write(model, PROMPT, 0).shape == (0,)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draw = torch.Generator().manual_seed(0)

    def measured(temperature, top):
        drawn = torch.stack([pick(shares.log(), temperature, top, draw) for _ in range(8000)])
        return drawn.bincount(minlength=4) / 8000

    sharp = shares**2 / (shares**2).sum()
    torch.testing.assert_close(measured(1.0, None), shares, atol=0.017, rtol=0)  # three standard deviations
    torch.testing.assert_close(measured(0.5, None), sharp, atol=0.017, rtol=0)
    torch.testing.assert_close(measured(1.0, 2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.017, rtol=0)
