plan = sampler.plan()
assert (plan.batches, plan.samples, plan.padding) == (5, 40, 0), plan
assert np.bincount(buckets).tolist() == [8] * 5
dataset.close()
