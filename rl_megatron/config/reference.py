"""The reference of DPO, whose log-probs can be computed once."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import NonNegativeInt

from rl_megatron.config.base import Idle
from rl_megatron.config.model import ReferenceConfig


class DPOReferenceConfig(ReferenceConfig):
    """The frozen model of DPO. Its log-probs are computed once, and kept on disk."""

    precompute_ref_logprobs: bool = True
    """Take log-probs from a cache, so that no reference is held in training. false: compute them
    in every step."""

    cache: str | None = None
    """Folder of the cache; one that was made for something else is refused. null: the folder of
    this model in runs/ref_cache, found or made."""

    build_cache: bool = True
    """Compute rows that the cache lacks. false: refuse to start without them."""

    verify_rows: NonNegativeInt = 8
    """Rows of the cache that are computed again and compared before training; needs the reference
    for a moment. 0: none."""

    def idle(self) -> Mapping[str, Idle]:
        """What only one of the two ways reads."""
        if self.precompute_ref_logprobs:
            reason = (
                "reference.precompute_ref_logprobs is true, so no reference is held; remove this "
                "key or set that to false"
            )
            return {"placement": Idle(reason, ("precompute_ref_logprobs",))}
        reason = "reference.precompute_ref_logprobs is false; remove this key or set that to true"
        off = Idle(reason, ("precompute_ref_logprobs",))
        return dict.fromkeys(("cache", "build_cache", "verify_rows"), off)
