(before, labels_before), (after, labels_after) = steps
assert before.shape == after.shape == (24, 3, 224, 224) and before.dtype == after.dtype == torch.float32
assert labels_before == labels_after, "the same seed gives the same order"
assert abs(before.mean() - after.mean()) < 0.5
