import pytest

from dovetail.training.metrics import StepMetrics
from dovetail.views.curve import draw_losses, smoothed

pytest.importorskip("matplotlib")


def test_a_smoothed_curve_neither_lags_nor_bends_at_its_ends():
    line = [10.0 - i for i in range(9)]
    assert smoothed(line, reach=3) == pytest.approx(line)
    assert smoothed([4.0, 1.0, 4.0], reach=5) == pytest.approx([4.0, 3.0, 4.0])


def test_a_run_is_drawn_with_and_without_held_out_losses(tmp_path):
    points = [StepMetrics(i, 5 / i, 1e-3, 100 * i, 0.1 * i, 5.2 / i if i % 4 == 0 else None) for i in range(1, 20)]
    draw_losses(points, tmp_path / "with.png", "a run")
    draw_losses([p for p in points if p.val_loss is None], tmp_path / "without.png", "a run")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
    draw_losses(points[:1], tmp_path / "one.svg", "one step")
    assert "<svg" in (tmp_path / "one.svg").read_text()
