assert len(dataset) == 7
assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(7))
