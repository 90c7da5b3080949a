batches = iter(loader)
begun = [next(batches)[1].tolist() for _ in range(2)]
state = loader.state_dict()
rest = [lengths.tolist() for _, lengths in batches]
assert len({length for batch in begun + rest for length in batch}) == 40
resumed = DataLoader(
    dataset, batch_sampler=BudgetSampler(sizes, budget=4, seed=0), collate_fn=collate, num_workers=0
)
resumed.load_state_dict(state)
assert [lengths.tolist() for _, lengths in resumed] == rest
assert sampler.plan().padding < 0.1
dataset.close()
