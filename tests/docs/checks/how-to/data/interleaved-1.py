batches = list(loader)
assert sum(len(batch["token_counts"]) for batch in batches) == 24
for batch in batches:
    used = int(batch["token_counts"].sum()) + PATCHES * int(batch["image_counts"].sum())
    assert used <= 256 and len(batch["images"]) == batch["image_counts"].sum()
assert dataset[4]["images"] == [] and len(dataset[7]["images"]) == 3
dataset.close()
