def make(workers):
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, seed=1), num_workers=workers, seed=1)


def pixels(batch):
    return batch[0].sum().item(), batch[1].tolist()


unbroken = make(2)
expected = [pixels(batch) for _ in range(2) for batch in unbroken]
first = make(2)
batches = iter(first)
read = [pixels(next(batches)) for _ in range(4)]
second = make(1)
second.load_state_dict(first.state_dict())
read += [pixels(batch) for _ in range(2) for batch in second]
assert read == expected
from fastload.errors import ArgumentError

begun = iter(loader)
next(begun)
state = loader.state_dict()

for other in ({"batch_size": 8, "seed": 1}, {"batch_size": 4, "seed": 2}):
    try:
        DataLoader(dataset, shuffle=True, **other).load_state_dict(state)
        raise AssertionError(other)
    except ArgumentError:
        pass
