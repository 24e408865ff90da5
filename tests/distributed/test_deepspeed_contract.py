"""The DeepSpeed backend keeps the contracts of every backend, in every stage of ZeRO."""

import pytest

from tests.helpers import backend_contract
from tests.helpers.backend_contract import BACKEND_CHECKS, BackendSetup
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", rope=LLAMA3_ROPE)


def backend_contract_job(stage, check, folder, scratch):
    from rl_megatron.parallel.process import start_data_parallel
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()

    def empty_folder(name):
        if process.is_main:
            (scratch / name).mkdir()
        process.barrier()
        return scratch / name

    def make(micro_batching, optimizer):
        return make_deepspeed(folder, process, stage, micro_batching, optimizer)

    getattr(backend_contract, check)(BackendSetup(folder, make, empty_folder))


@pytest.mark.parametrize("check", [check.__name__ for check in BACKEND_CHECKS])
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (1, 3)])
def test_backend_contract(ranks, stage, check, folder, pool, tmp_path):
    pool(ranks).run(backend_contract_job, stage, check, folder, tmp_path)
