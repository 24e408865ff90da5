"""The numbers of each step: `metrics.jsonl` always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rl_megatron.errors import ConfigError
from rl_megatron.metrics.jsonl import JsonlFile

METRICS_FILE = "metrics.jsonl"
_WANDB_ID_FILE = "wandb_id.txt"

logger = logging.getLogger(__name__)


class _Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes metrics by step on rank 0; on other ranks every method does nothing.

    Args:
        run_folder: Where `metrics.jsonl` and `tensorboard/` go; made if missing.
        rank: This process among all of the run.
        tensorboard: Whether to write `tensorboard/`.
        wandb_project: Project on Weights & Biases, None for no upload.
        run_name: Name of the run there.
        resumed_from: The last step that was saved before the run stopped; later ones are dropped
            from the files, as they are about to come again. None for a new run.

    Raises:
        ConfigError: wandb is asked for and not installed.
    """

    def __init__(
        self,
        run_folder: Path,
        rank: int,
        *,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        run_name: str | None = None,
        resumed_from: int | None = None,
    ) -> None:
        self._sinks: list[_Sink] = []
        if rank != 0:
            return
        run_folder.mkdir(parents=True, exist_ok=True)
        self._sinks.append(_Jsonl(run_folder / METRICS_FILE, resumed_from))
        if tensorboard:
            self._sinks.append(_TensorBoard(run_folder / "tensorboard", resumed_from))
        if wandb_project is not None:
            self._sinks.append(_WandB(wandb_project, run_name, run_folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what is known of `step`, at once; call it once a step, and once per evaluation."""
        if not self._sinks:
            return
        for name, value in metrics.items():
            if not math.isfinite(value):
                logger.warning("step %d: %s is %s; metrics.jsonl says null", step, name, value)
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Finish all files."""
        for sink in self._sinks:
            sink.close()


class _Jsonl:
    """One line per write. JSON has no NaN or infinity: they become null."""

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        self._file = JsonlFile(path, resumed_from)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.append(step, row)

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Event files; imported on use, as the import takes a second."""

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Weights & Biases, an optional package."""

    def __init__(self, project: str, run_name: str | None, run_folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logging.wandb_project is '{project}', but the package wandb is not installed: "
                "pip install wandb, or set logging.wandb_project to null"
            ) from error
        # An attempt that goes on draws on in the curves of those before.
        known = run_folder / _WANDB_ID_FILE
        if not known.exists():
            known.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project,
            name=run_name,
            dir=str(run_folder),
            id=known.read_text(encoding="utf-8").strip(),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
