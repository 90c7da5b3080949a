assert sum(map(len, seen)) == 24
whole = [index for index in sampler.__class__(dataset, 1, 0, seed=1)]
halves = [[index for index in DistributedSampler(dataset, 2, rank, seed=1)] for rank in (0, 1)]
assert [index for pair in zip(*halves) for index in pair] == whole
one = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 1, 0, seed=1))
batches = iter(one)
first = next(batches)
state = one.state_dict()
assert len(json.dumps(state)) < 4000
rest = []
for rank in (0, 1):
    two = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, rank, seed=1))
    two.load_state_dict(state)
    rest.append([labels.tolist() for images, labels in two])
together = [sorted(a + b) for a, b in zip(*rest)]
assert together == [sorted(labels.tolist()) for images, labels in batches], (together, rest)
