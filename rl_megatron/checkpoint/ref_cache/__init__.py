"""Reference log-probs on disk: computed once, found by content, under any layout and in any order.

A cache is a folder: shards that are never changed once they have their name, an index, and a
manifest that is written last and says which of them count. What it is good for is written in its
fingerprint: all that changes a number (weights, shape, dtype, temperature) and nothing else.
"""

from rl_megatron.checkpoint.ref_cache.files import clean, verify_files
from rl_megatron.checkpoint.ref_cache.fingerprint import Fingerprint, make_fingerprint
from rl_megatron.checkpoint.ref_cache.manifest import (
    Manifest,
    agreed_manifest,
    check_fingerprint,
    read_manifest,
)
from rl_megatron.checkpoint.ref_cache.reader import RefCache
from rl_megatron.checkpoint.ref_cache.rows import row_keys
from rl_megatron.checkpoint.ref_cache.writer import RefCacheWriter

__all__ = [
    "Fingerprint",
    "Manifest",
    "RefCache",
    "RefCacheWriter",
    "agreed_manifest",
    "check_fingerprint",
    "clean",
    "verify_files",
    "make_fingerprint",
    "read_manifest",
    "row_keys",
]
