def digest(workers, seed):
    torch.manual_seed(0)
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=workers, seed=seed)
    return [(images.sum().item(), labels.tolist()) for images, labels in loader]


seen = digest(0, seed=1)
assert digest(1, seed=1) == digest(2, seed=1) == seen
assert digest(0, seed=2) != seen  # other crops


def indices(ranks, rank):
    return list(DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=1))


pairs = zip(indices(2, 0), indices(2, 1))
assert [index for pair in pairs for index in pair] == indices(1, 0)  # rank r has every second sample
