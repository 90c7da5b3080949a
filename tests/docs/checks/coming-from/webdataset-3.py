assert sorted(after) == sorted(before), after
assert len(dataset) == 32
