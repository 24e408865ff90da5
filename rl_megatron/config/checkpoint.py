"""When a run saves and stops, and what it goes on from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic import Strict as StrictMode

from rl_megatron.config.base import Strict


class CheckpointConfig(Strict):
    """Checkpoints in `checkpoints/` of the run folder. How often is `train.save_interval`."""

    resume: str = Field(default="auto", min_length=1)
    """auto: go on from the last checkpoint of the run folder, if it holds this run. never: refuse a
    folder that holds a run. Or a path, of a run folder, its checkpoints/ or one iter_ folder: the
    first attempt goes on from there, later ones from their own."""

    allow_changes: Annotated[tuple[str, ...], StrictMode(False)] = ()
    """Settings that may differ from those of the checkpoint, e.g. [optimizer.lr, train]. Every
    other difference that changes numbers is refused. After a change of `data.train` the run begins
    with the first row of the new data."""

    keep_last: PositiveInt | None = None
    """Checkpoints kept; older ones are deleted once a newer one is on disk. null: all."""

    async_save: bool = True
    """Write in the background while training goes on. Changes no number."""

    exit_duration_in_minutes: PositiveFloat | None = None
    """Save and end with exit code 75 once the attempt has run for this long; null: run to the
    end."""

    exit_before_end_minutes: PositiveFloat = 5.0
    """Save and end with exit code 75 when the next step could not be over this long before the end
    of the SLURM allocation (SLURM_JOB_END_TIME)."""

    def allows(self, key: str) -> bool:
        """Whether the setting `key`, or a section that it is in, is among `allow_changes`."""
        return any(key == name or key.startswith(f"{name}.") for name in self.allow_changes)
