import pytest
import torch

from dovetail.files.spec import from_yaml

TINY = """
dovetail: 1
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {hidden: 44}
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    return from_yaml(TINY)


@pytest.fixture
def lively():
    """Makes a model whose initial weights are large enough for every part to matter."""

    def enlarge(model, factor=8.0):
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(factor)
        return model

    return enlarge
