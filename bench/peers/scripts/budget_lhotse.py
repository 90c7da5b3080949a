# pip install torch==2.13.0 numpy==2.3.5 lhotse==1.33.0 urllib3

"""lhotse's DynamicBucketingSampler over cuts of given durations.

Arguments: sizes.npy, budget, batches.npz.
"""

import sys
import time

import numpy as np
from lhotse import CutSet, MonoCut
from lhotse.dataset import DynamicBucketingSampler

given, budget, made = sys.argv[1:]
sizes = np.load(given).tolist()
cuts = CutSet.from_cuts(
    MonoCut(id=str(number), start=0, duration=float(size), channel=0) for number, size in enumerate(sizes)
)
begin = time.process_time()
sampler = DynamicBucketingSampler(
    cuts,
    max_duration=float(budget),
    num_buckets=30,
    shuffle=True,
    drop_last=False,
    seed=0,
    world_size=1,
    rank=0,
)
batches, first = [], 0.0
for batch in sampler:
    first = first or time.process_time() - begin
    batches.append([int(cut.id.partition("_")[0]) for cut in batch])
seconds = time.process_time() - begin
np.savez(
    made,
    samples=np.array([index for batch in batches for index in batch]),
    bounds=np.cumsum([0, *map(len, batches)]),
    seconds=[seconds, first],
)
