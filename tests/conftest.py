"""What holds for every test: its marker, one thread, no network."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported by any test: several processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that would download something must fail, here and in the processes it starts.
os.environ["HF_HUB_OFFLINE"] = "1"

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent))

from tests.helpers.pool import Pool  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder under tests/."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(world_size)`: the shared pool of that many gloo processes."""
    pools: dict[int, Pool] = {}
    yield lambda world_size: pools.setdefault(world_size, Pool(world_size))
    for made in pools.values():
        made.close()
