"""A picture of a run's metrics over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_megatron.metrics.jsonl import read_jsonl
from rl_megatron.metrics.writer import METRICS_FILE

CURVE_FILE = "curve.png"


def draw_curve(run_folder: Path, names: Sequence[str]) -> Path | None:
    """`curve.png` in the run folder: one panel per metric that the run has; None if it has none.

    Args:
        run_folder: Where `metrics.jsonl` is.
        names: Metrics, top to bottom. A value that was not finite leaves a gap.
    """
    # Imported on use, without pyplot: no display is needed and no global figure is kept.
    from matplotlib.figure import Figure

    curves = read_curves(run_folder, names)
    if not curves:
        return None
    figure = Figure(figsize=(7.0, 0.6 + 2.0 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, (steps, values)) in zip(panels, curves.items(), strict=True):
        panel.plot(steps, values, marker="." if len(steps) < 50 else "")
        panel.set_ylabel(name, fontsize=8)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    path = run_folder / CURVE_FILE
    figure.savefig(path, dpi=120)
    return path


def read_curves(run_folder: Path, names: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each named metric that the run has at least once, in the order given."""
    rows = list(read_jsonl(run_folder / METRICS_FILE))
    curves = {}
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            values = [float("nan") if value is None else value for _, value in points]
            curves[name] = ([step for step, _ in points], values)
    return curves
