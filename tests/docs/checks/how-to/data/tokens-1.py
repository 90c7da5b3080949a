for batch in loader:
    flat = batch["tokens"].flatten().tolist()
    edges, where = batch["cu_seqlens"].tolist(), batch["positions"].flatten().tolist()
    assert edges[0] == 0 and edges[-1] == len(flat) and batch["cu_seqlens"].dtype == torch.int32
    for start, stop in zip(edges, edges[1:]):
        assert where[start:stop] == list(range(stop - start)) and stop - start <= 64
        assert 0 not in flat[start : stop - 1] and (flat[stop - 1] == 0 or stop % 64 == 0)
