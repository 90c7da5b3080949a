batches = list(loader)
assert sum(len(batch["token_counts"]) for batch in batches) == 24
for batch in batches:
    assert batch["tokens"].numel() + PATCHES * len(batch["images"]) <= 256
    assert len(batch["tokens"]) == batch["token_counts"].sum()
    assert len(batch["images"]) == batch["image_counts"].sum()
assert dataset[4]["images"] == [] and len(dataset[7]["images"]) == 3
dataset.close()
