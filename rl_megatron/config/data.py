"""Where rows come from, and what happens to those that are too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveInt

from rl_megatron.config.base import Idle, Strict
from rl_megatron.config.schema import OneOrNamed

Overlong = Literal["error", "drop", "truncate_left", "truncate_right"]


class DataSource(Strict):
    """A set of rows. Fields that no key names are passed on to rewards untouched."""

    path: str = Field(min_length=1)
    """A .jsonl file, a folder, or a name on the Hugging Face hub."""

    split: str = "train"
    """Which split of a folder or of a data set on the hub."""

    prompt_key: str = "prompt"
    """Field with the prompt: text, or a list of chat messages."""

    response_key: str = "response"
    """Field with the response (SFT, KTO)."""

    chosen_key: str = "chosen"
    """Field with the better response (DPO, reward model)."""

    rejected_key: str = "rejected"
    """Field with the worse response (DPO, reward model)."""

    answer_key: str = "answer"
    """Field with the known correct answer that a reward compares with."""

    def idle(self) -> Mapping[str, Idle]:
        """`split`, which a single file does not have."""
        if self.path.endswith(".jsonl"):
            return {"split": Idle("a .jsonl file has no splits; remove this key", ("path",))}
        return {}


class JudgedSource(DataSource):
    """Responses that are each desirable or not."""

    label_key: str = "label"
    """Field that says whether the response is desirable: true or false."""

    unpair: bool = False
    """Rows are preference pairs, and each gives two: chosen is desirable, rejected is not."""

    def idle(self) -> Mapping[str, Idle]:
        """The fields of the other kind of rows."""
        idle = dict(super().idle())
        if self.unpair:
            reason = "unpair is true: pairs have chosen and rejected; remove this key"
            keys = ("response_key", "label_key")
        else:
            reason = "unpair is false: rows have one response; set it to true, or remove this key"
            keys = ("chosen_key", "rejected_key")
        return idle | dict.fromkeys(keys, Idle(reason, ("unpair",)))


class DataConfig(Strict):
    """What all data have."""

    train: DataSource
    """Rows to train on."""

    eval: OneOrNamed[DataSource] | None = None
    """Held-out rows; or several sets of them, {name: {path: ...}, ...}, names of letters, digits, _
    and -. Metrics of a set are evaluation/<name>/..."""

    overlong: Overlong = "error"
    """What happens to a row that is too long: stop, leave it out and count it, or cut tokens off
    its start or its end."""

    shuffle: bool = True
    """Draw rows in an order that depends on the seed and the epoch; false: in file order."""

    @property
    def held_out(self) -> Mapping[str, DataSource]:
        """Sets of held-out rows by name; one that has none is called ""."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, DataSource) else self.eval


class ResponseDataConfig(DataConfig):
    """Rows with responses."""

    max_length: PositiveInt = 2048
    """Longest sequence, prompt and response together, in tokens."""


class PairSource(DataSource):
    """Preference pairs for a reward model."""

    margin_key: str | None = None
    """Field with the margin of a pair: by how much the reward of chosen is to exceed that of
    rejected, a number. null: none, even if the rows have one."""


class PairDataConfig(ResponseDataConfig):
    """Preference pairs for a reward model."""

    train: PairSource
    """Rows to train on."""

    eval: OneOrNamed[PairSource] | None = None
    """Held-out rows, or several sets of them by name."""


class JudgedDataConfig(ResponseDataConfig):
    """Rows with responses and verdicts."""

    train: JudgedSource
    """Rows to train on."""

    eval: OneOrNamed[JudgedSource] | None = None
    """Held-out rows; or several sets of them, {name: {path: ...}, ...}, names of letters, digits, _
    and -. Metrics of a set are evaluation/<name>/..."""


class PromptDataConfig(DataConfig):
    """Rows with prompts."""

    eval: DataSource | None = None
    """Held-out rows."""

    max_prompt_length: PositiveInt = 1024
    """Longest prompt in tokens."""
