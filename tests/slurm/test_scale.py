"""64 nodes of eight ranks: who is who, where they meet, what is left. The ranks compute nothing."""

import pytest

from tests.slurm.cluster import Cluster, running
from tests.slurm.conftest import Desk

NODES, RANKS = 64, 8


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    # More ranks than this machine has time for: a node that is slow to answer has not failed.
    with running(Cluster(NODES, cpus=64, gpus=RANKS, node_timeout=120)) as cluster:
        yield Desk(cluster, tmp_path_factory.mktemp("scale"))


@pytest.mark.timeout(600)
def test_sixty_four_nodes(desk):
    options = (f"--nodes={NODES}",)
    gpus = {"SBATCH_GPUS_PER_NODE": str(RANKS)}
    job = desk.submit("scale", "steps=2", "seconds=0", "patience=300", options=options, **gpus)
    log = desk.finish(job, "scale", seconds=400)
    ranks = desk.ranks("scale")
    assert [int(rank["RANK"]) for rank in ranks] == list(range(NODES * RANKS))
    for number, rank in enumerate(ranks):
        assert int(rank["LOCAL_RANK"]) == number % RANKS
        assert int(rank["SLURM_NODEID"]) == number // RANKS
        assert rank["host"] == f"node{number // RANKS + 1}"
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"512"}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"node1"}
    assert f"{NODES} nodes x {RANKS} ranks on node[1-64], rendezvous node1:2" in log
    assert desk.state("scale")["step"] == 2


def test_one_node_of_64_fails(desk):
    """The job says which rank it was, of 512, and nothing is left running."""
    name, options = "scale_fails", (f"--nodes={NODES}",)
    words = ("steps=2", "seconds=0", "patience=300", "fail=300:1:9")
    gpus = {"SBATCH_GPUS_PER_NODE": str(RANKS)}
    job = desk.submit(name, *words, options=options, **gpus)
    log = desk.finish(job, name, "FAILED", seconds=250)
    assert desk.cluster.job(job)["ExitCode"] == "9:0"
    assert log.splitlines()[-2] == "rank 300 on node38 ended with exit code 9"
