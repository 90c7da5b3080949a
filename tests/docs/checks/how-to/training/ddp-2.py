from fastload import DataLoader


def make(rank, ranks, batch_size):
    sampler = DistributedSampler(range(24), num_replicas=ranks, rank=rank, seed=1)
    return DataLoader(range(24), batch_size, sampler=sampler)


used, state = [], None
for rank in range(4):
    loader = make(rank, 4, batch_size=2)
    batches = iter(loader)
    used += next(batches).tolist()  # one step on 4 ranks
    state = state or loader.state_dict()  # of rank 0
for rank in range(2):
    loader = make(rank, 2, batch_size=4)
    loader.load_state_dict(state)
    used += [index for batch in loader for index in batch.tolist()]  # the rest on 2 ranks
assert sorted(used) == list(range(24))  # no sample is lost or repeated
