"""Qwen2-VL with images: positions of three coordinates from outside, against transformers' own. No pixel is read: the tokens of
an image have the embedding of the image token, so that the text model and its positions are what is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_pair import apart, saved
from safetensors.torch import save_file
from torch import Tensor

from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.state.pool import Pool

FAMILY = "qwen2_vl_text"
IMAGE, START, END = 60, 58, 59
TEXT: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "intermediate_size": 44,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 3]},
}
VISION: dict[str, Any] = {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": 36, "mlp_ratio": 2, "patch_size": 2}
GRIDS = ((1, 4, 8), (1, 6, 4))  # patches in time, height, width; 2 × 2 of them are one token


class Pair:
    """Theirs, with a vision tower that nobody calls, and our text model with a head and the same weights."""

    def __init__(self, windows: bool) -> None:
        more = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if windows else {}
        text = {**TEXT, **more, "bos_token_id": None, "eos_token_id": None}
        ids = {"image_token_id": IMAGE, "vision_start_token_id": START}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=VISION, **ids)
        self.theirs: Any = transformers.Qwen2VLForConditionalGeneration(config).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter + 0.3 * drawn if parameter.dim() == 1 else 0.3 * drawn)
        self.text = self.theirs.model.language_model
        self.config = {**self.text.config.to_dict(), "architectures": ["Qwen2VLTextModel"]}
        self.spec = from_hf(self.config).set("head", {"kind": "lm", "tied": False})
        self.ours = build(self.spec)
        self.load(self.text, self.theirs.lm_head.weight)

    def load(self, text: Any, head: Tensor) -> None:
        with torch.no_grad():
            for path, tensor in self.tensors(text, head).items():
                tensor_at(self.ours, path).copy_(tensor)

    def tensors(self, text: Any, head: Tensor) -> dict[str, Tensor]:
        """Their text model and head by our paths."""
        return {**import_tensors(from_hf(self.config), saved(text), FAMILY), "head.out.weight": head}

    def positions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Their positions (batch, n, 3), and the delta of each row."""
        kinds = (tokens == IMAGE).int()
        grids = torch.tensor([grid for row in tokens for grid in GRIDS[: int((row == START).sum())]])
        at, delta = self.theirs.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
        return at.permute(1, 2, 0), delta[:, 0]


def prompts() -> Tensor:
    """A row with one image and a row with two, of equal length."""
    first, second = ([START, *[IMAGE] * (h // 2 * w // 2), END] for _, h, w in GRIDS)
    return torch.tensor([[5, 7, 11, *first, *range(20, 29)], [3, *first, 9, *second, 4, 6]])


@pytest.fixture(scope="module", params=[False, True], ids=["full", "windows"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_logits(pair: Pair) -> None:
    tokens = prompts()
    at, delta = pair.positions(tokens)
    assert delta.tolist() == [-4, -7]
    with torch.no_grad():
        theirs = pair.theirs(input_ids=tokens, position_ids=at.permute(2, 0, 1)).logits
        ours = pair.ours(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape).at(at)))
        text = pair.ours(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape)))
    assert apart(ours, theirs) <= 1e-5
    assert apart(text, theirs) > 1e-2  # positions by order are another function


@pytest.mark.parametrize("when", ["write", "read"])
def test_greedy_tokens(pair: Pair, when: str) -> None:
    """Their generate() makes positions and deltas itself; ours are given those of the prompt alone."""
    tokens, new = prompts(), 24
    kinds = (tokens == IMAGE).int()
    grids = torch.tensor([GRIDS[0], *GRIDS])
    made = pair.theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        image_grid_thw=grids,
        mm_token_type_ids=kinds,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, tokens.shape[1] :]
    at, _ = pair.positions(tokens)
    model = build(pair.spec.replace("layers.*.mixer.position.when", when))
    model.load_state_dict(pair.ours.state_dict())
    pool = Pool(model.spec, 2, tokens.shape[1] + new, coords=3)
    step, chosen, ours = pool.step([0, 1], [tokens.shape[1]] * 2, positions=list(at)), tokens, []
    with torch.no_grad():
        for _ in range(new):
            chosen = model(chosen, Ctx(layout=step.layout, views=step.views))[:, -1:].argmax(-1)
            ours.append(chosen)
            step = pool.step([0, 1], [1, 1])
    assert torch.cat(ours, 1).tolist() == made.tolist()
    assert len(set(made.flatten().tolist())) > 8  # not one token again and again
    assert model.generate(tokens[1], new, positions=at[1]) == made[1].tolist()


def test_gradients() -> None:
    pair, tokens = Pair(windows=False), prompts()
    at, _ = pair.positions(tokens)
    weight = torch.randn(*tokens.shape, 62, generator=torch.Generator().manual_seed(1))
    (pair.theirs(input_ids=tokens, position_ids=at.permute(2, 0, 1)).logits * weight).sum().backward()
    (pair.ours(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape).at(at))) * weight).sum().backward()
    head = pair.theirs.lm_head.weight.grad
    for parameter in pair.text.parameters():
        parameter.data = parameter.grad  # gradients take the road of the weights
    wanted = pair.tensors(pair.text, head)
    largest = max(grad.abs().max().item() for grad in wanted.values())
    assert wanted.keys() == {name for name, _ in pair.ours.named_parameters()}
    for path, grad in wanted.items():
        got = tensor_at(pair.ours, path).grad
        assert got is not None, path
        assert (got - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7 * largest, path


def test_files_of_the_text_model_are_bit_equal(pair: Pair, tmp_path: Path) -> None:
    spec, files = from_hf(pair.config), saved(pair.text)
    got = export_tensors(spec, import_tensors(spec, files, FAMILY), FAMILY)
    assert got.keys() == files.keys()
    assert all(tensor.equal(files[name]) for name, tensor in got.items())
    ported = to_hf(spec, FAMILY)
    assert ported.config["rope_parameters"]["mrope_section"] == [1, 2, 3]
    save_file(got, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(ported.config))
    rebuilt = transformers.Qwen2VLTextModel.from_pretrained(tmp_path).eval()
    tokens = prompts()
    at = pair.positions(tokens)[0].permute(2, 0, 1)
    with torch.no_grad():
        assert rebuilt(input_ids=tokens, position_ids=at)[0].equal(pair.text(input_ids=tokens, position_ids=at)[0])
