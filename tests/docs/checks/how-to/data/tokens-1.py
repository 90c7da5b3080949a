documents = []
for name in ("000", "001"):
    tokens = np.frombuffer(store.read(f"{name}.bin"), "uint16")
    for document in np.split(tokens, np.flatnonzero(tokens == END) + 1):
        documents += [document[at : at + T].tolist() for at in range(0, len(document), T)]
documents = [document for document in documents if document]
found, rows = [], 0
for row in loader:
    rows += 1
    edges = row["cu_seqlens"].tolist()
    assert edges[0] == 0 and edges[-1] == T and row["cu_seqlens"].dtype == torch.int32
    for start, stop in zip(edges, edges[1:]):
        assert row["positions"][start:stop].tolist() == list(range(stop - start))
        found.append(row["tokens"][start:stop].tolist())
found = [document for document in found if set(document) != {END}]
assert sorted(found) == sorted(documents) and rows == sampler.plan(0).steps < 1.2 * 10_000 / T
dataset.close()
