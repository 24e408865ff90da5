import pytest

from tools.make_addition_task import write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """The addition task: a folder with model/ and data files."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0, repeats=1)
    return folder
