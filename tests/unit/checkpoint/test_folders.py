"""What a path is, and what is said of one that is nothing."""

import pytest

from rl_megatron.checkpoint.folders import ModelFolder, resolve_model_folder
from rl_megatron.errors import CheckpointError


def make(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    return folder


MEGATRON = ("metadata.json", ".metadata", "common.pt", "hf/config.json")


def test_hugging_face_folders(tmp_path):
    for name in ("model.safetensors", "model.safetensors.index.json"):
        folder = make(tmp_path / name, "config.json", name)
        assert resolve_model_folder(folder) == ModelFolder(hf=folder)


def test_megatron_root_and_single_checkpoint(tmp_path):
    old, new = (make(tmp_path / f"iter_000000{i}", *MEGATRON) for i in (1, 2))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert resolve_model_folder(tmp_path) == ModelFolder(hf=new / "hf", megatron=new)
    assert resolve_model_folder(old) == ModelFolder(hf=old / "hf", megatron=old)


def test_what_backend_torch_saves_is_a_hugging_face_folder(tmp_path):
    folder = make(tmp_path / "iter_0000003", "config.json", "model.safetensors", "optimizer.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    for path in (tmp_path, folder):
        assert resolve_model_folder(path) == ModelFolder(hf=folder)


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("missing", None, ["does not exist"]),
        ("empty", (), ["no config.json", "latest_checkpointed_iteration.txt"]),
        ("bare", ("config.json",), ["no weights", "model.safetensors"]),
        ("pickled", ("config.json", "pytorch_model.bin"), ["Only safetensors"]),
        ("iter_0000003", ("hf/config.json",), ["incomplete", "metadata.json, .metadata"]),
        ("iter_0000004", MEGATRON[:3], ["incomplete", "hf/config.json"]),
        ("iter_0000005.tmp", MEGATRON, ["was being written"]),
        ("root", ("latest_checkpointed_iteration.txt",), ["'{}'", "not a number"]),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_named_with_what_it_lacks(name, files, words, tmp_path):
    folder = tmp_path / name
    if files is not None:
        folder.mkdir()
        make(folder, *files)
    with pytest.raises(CheckpointError) as error:
        resolve_model_folder(folder)
    for word in [str(folder), *words]:
        assert word in str(error.value)


def test_a_file_is_not_a_folder_and_the_setting_is_named(tmp_path):
    path = make(tmp_path, "model.gguf") / "model.gguf"
    with pytest.raises(CheckpointError, match=r"reference\.path .* is a file"):
        resolve_model_folder(path, "reference.path")
