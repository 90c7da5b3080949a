# pip install numpy==2.3.5 datasets==5.2.0

"""Hugging Face's `batch(by_column=)`: it groups rows by a column, in which the user writes the batch.

Here the rows are shuffled, sorted by length in windows of 10,000, and cut where the padded batch would be
above the budget. Arguments: sizes.npy, budget, batches.npz.
"""

import sys
import tempfile
import time

import datasets
import numpy as np

given, budget, made = sys.argv[1], float(sys.argv[2]), sys.argv[3]
sizes = np.load(given)
datasets.disable_progress_bars()
with tempfile.TemporaryDirectory() as cache:
    datasets.config.HF_DATASETS_CACHE = cache
    begin = time.process_time()
    order = np.random.default_rng(0).permutation(len(sizes))
    windows = np.array_split(order, max(1, len(order) // 10_000))
    order = np.concatenate([window[np.argsort(sizes[window])] for window in windows])
    numbers, number, count, largest = [], 0, 0, 0.0
    for size in sizes[order].tolist():
        largest, count = max(largest, size), count + 1
        if largest * count > budget:
            number, largest, count = number + 1, size, 1
        numbers.append(number)
    rows = datasets.Dataset.from_dict({"index": order, "batch": numbers})
    batches = rows.batch(by_column="batch")
    chosen = [batch["index"] for batch in batches]
    seconds = time.process_time() - begin
np.savez(
    made,
    samples=np.array([index for batch in chosen for index in batch]),
    bounds=np.cumsum([0, *map(len, chosen)]),
    seconds=[seconds, 0.0],
)
