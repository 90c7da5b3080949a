import os
from fastload import DistributedSampler
from fastload.distributed import find_rank, local_ranks

os.environ |= {
    "SLURM_PROCID": "13",
    "SLURM_NTASKS": "32",
    "SLURM_LOCALID": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
    "SLURM_STEP_NUM_NODES": "4",
}
for more in ({}, {"RANK": "13", "WORLD_SIZE": "32"}):
    os.environ |= more
    assert find_rank() == (13, 32) and local_ranks() == 8
    assert DistributedSampler(range(320), partition="node")._place == (1, 5, 4)
share = set(
    DistributedSampler(range(320), 4, 1, partition="node", num_nodes=4)
)  # as `fastload warm` reads it
assert set(DistributedSampler(range(320), partition="node")) < share
