assert len(loader) == 5
batches = iter(loader)
begun = [next(batches)[1].tolist() for _ in range(2)]
state = loader.state_dict()
rest = [lengths.tolist() for _, lengths in batches]
assert len({length for batch in begun + rest for length in batch}) == 40
other = Buckets(dataset.listing().sizes, batch_size=8)
other.set_epoch(1)
resumed = DataLoader(dataset, batch_sampler=other, collate_fn=collate)
resumed.load_state_dict(state)
assert [lengths.tolist() for _, lengths in resumed] == rest
halves = [list(Buckets(range(48), 8, rank=rank, ranks=2)) for rank in range(2)]
assert sorted(sum(sum(halves, []), [])) == list(range(48))
dataset.close()
