assert len(dataset) == 24 and images.shape[1:] == (3, 224, 224)
for _ in range(2):
    assert sum(len(labels) for _, labels in loader) == 24
assert not dataset._streams().must_stream()
