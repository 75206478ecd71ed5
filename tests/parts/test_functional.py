"""dt.attention, dt.rope, dt.positions, dt.layer_norm and dt.scan: the numbers of textbooks, and the same functions in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dovetail as dt


def test_the_first_example_of_any_textbook() -> None:
    q, k, v = (
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        torch.tensor([[10.0], [20.0], [30.0]]),
    )
    assert dt.attention_weights(q, k)[0].tolist() == pytest.approx([0.4011, 0.1978, 0.4011], abs=1e-4)
    assert float(dt.attention(q, k, v)) == pytest.approx(20.0, abs=1e-4)
    same = torch.eye(3)
    assert dt.attention_weights(same, same)[0].tolist() == pytest.approx([0.471, 0.264, 0.264], abs=1e-3)


@pytest.mark.parametrize("shape", [(7, 8), (4, 7, 8), (2, 4, 7, 8), (2, 3, 4, 7, 8)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_attention_is_that_of_torch(shape: tuple[int, ...], mask: str) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    assert torch.allclose(dt.attention(q, k, v, mask=mask), want, atol=1e-12)
    assert torch.allclose(dt.attention_weights(q, k, mask=mask) @ v, want, atol=1e-12)


def test_heads_share_keys_and_values_and_a_window_counts_its_own_token() -> None:
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 5)
    want = dt.attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask={"kind": "window", "size": 3})
    assert torch.allclose(dt.attention(q, k, v, mask=dt.parts.Window(size=3)), want, atol=1e-6)
    weights = dt.attention_weights(q, k, mask=["causal", {"kind": "window", "size": 3}])
    assert (weights > 0).sum(-1)[0, 0].tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    newest = dt.attention(q[:, :, -1:], k, v, mask="causal")  # decoding: the last query is at the last key
    assert torch.allclose(newest, dt.attention(q, k, v, mask="causal")[:, :, -1:], atol=1e-6)


def test_a_soft_cap_and_another_scale() -> None:
    q, k = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    want = (2.0 * torch.tanh(q @ k.T * 3 / 2.0)).softmax(-1)
    assert torch.allclose(dt.attention_weights(q, k, scale=3.0, softcap=2.0), want, atol=1e-12)


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k = torch.randn(2, 7, 8), torch.randn(2, 6, 8)
    with pytest.raises(dt.DovetailError, match=r"q \(2, 7, 8\), k \(2, 6, 4\).* equally many channels"):
        dt.attention(q, k[..., :4], k)
    with pytest.raises(dt.DovetailError, match="equally many tokens"):
        dt.attention(q, k, k[:, :5])
    with pytest.raises(dt.DovetailError, match="2 heads of k and v do not divide 3 of q"):
        dt.attention(torch.randn(3, 7, 8), k, k)
    with pytest.raises(dt.DovetailError, match=r"no part is called 'casual'.*causal"):
        dt.attention(q, k, k, mask="casual")
    with pytest.raises(TypeError, match="unknown keyword 'causal'"):
        dt.attention(q, k, k, causal=True)  # pyright: ignore[reportCallIssue]


def test_rope_scores_depend_on_the_offset_alone() -> None:
    q, k = torch.randn(1, 16, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)

    def score(i: int, j: int, part: dt.parts.Rope | None = None) -> float:
        return float(dt.rope(q, part, start=i) @ dt.rope(k, part, start=j).T)

    assert score(2, 5) == pytest.approx(score(100, 103), abs=1e-12)
    assert score(2, 5) != pytest.approx(score(2, 6), abs=1e-3)
    adjacent = dt.parts.Rope(pairs="adjacent", base=100.0)
    assert score(2, 5, adjacent) == pytest.approx(score(50, 53, adjacent), abs=1e-12)
    x = torch.tensor([[[1.0, 0.0]] * 3])  # one pair turns by one radian per position
    assert torch.allclose(dt.rope(x)[0], torch.stack([torch.arange(3.0).cos(), torch.arange(3.0).sin()], -1), atol=1e-6)
    with pytest.raises(dt.DovetailError, match="cannot be paired"):
        dt.rope(torch.randn(3, 5))


def test_sinusoidal_positions() -> None:
    assert dt.positions(2, 4)[0].tolist() == [0, 1, 0, 1]
    assert dt.positions(2, 4)[1].tolist() == pytest.approx([0.8415, 0.5403, 0.0100, 1.0000], abs=5e-5)
    assert torch.equal(dt.positions(3, 8, start=4), dt.positions(7, 8)[4:])


def test_layer_norm_is_that_of_torch() -> None:
    x, scale, shift = torch.randn(3, 6), torch.randn(6), torch.randn(6)
    assert torch.equal(dt.layer_norm(x, scale, shift), F.layer_norm(x, (6,), scale, shift))
    assert float(dt.layer_norm(x).mean(-1).abs().max()) < 1e-6


def test_the_scan_of_an_impulse_is_the_same_as_a_recurrence_and_a_convolution() -> None:
    impulse = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    want = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
    for form in ("recurrence", "convolution"):
        assert dt.scan(impulse, 0.9, 0.5, 1.0, form=form).tolist() == pytest.approx(want, abs=1e-12)
    with pytest.raises(dt.DovetailError, match="oscillate or grow"):
        dt.scan(impulse, 1.1)
