import math
from pathlib import Path

from PIL import Image

from rl_megatron.metrics.curve import draw_curve, read_curves
from rl_megatron.metrics.writer import MetricsWriter


def write_metrics(folder: Path) -> None:
    writer = MetricsWriter(folder, rank=0)
    writer.write(1, {"loss/total": 0.5, "rewards/mean": 0.1})
    writer.write(2, {"loss/total": float("nan")})
    writer.write(2, {"eval/greedy_accuracy": 0.75})
    writer.close()


def test_each_metric_has_its_own_steps_and_a_gap_where_it_was_not_finite(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    curves = read_curves(tmp_path, ["eval/greedy_accuracy", "loss/total", "never/written"])
    assert list(curves) == ["eval/greedy_accuracy", "loss/total"]
    assert curves["eval/greedy_accuracy"] == ([2], [0.75])
    steps, values = curves["loss/total"]
    assert steps == [1, 2]
    assert values[0] == 0.5
    assert math.isnan(values[1])


def test_the_picture_has_one_panel_per_metric(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    heights = []
    for names in (["loss/total"], ["loss/total", "rewards/mean"]):
        path = draw_curve(tmp_path, names)
        assert path == tmp_path / "curve.png"
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            heights.append(picture.height)
    assert heights[1] > heights[0]


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    assert draw_curve(tmp_path, ["never/written"]) is None
    assert not (tmp_path / "curve.png").exists()
