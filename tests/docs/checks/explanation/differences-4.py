[one, two] = all_of(lambda index: torch.arange(4.0)[::2], collate_fn=lambda samples: samples)
assert not one[0].is_shared() and one[0].is_contiguous()
with pytest.warns(UserWarning, match="drop_last=True drops its only batch"):
    DataLoader(train, 256, drop_last=True)


def odd(index):
    if index % 2:
        raise ValueError("odd")
    return index


assert [batch.tolist() for batch in all_of(odd, on_error="repeat")] == [[0, 0], [2, 2]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


with pytest.raises(ArgumentError):
    list(DataLoader(Stream(), on_error="repeat"))
iterator = iter(DataLoader(train, 4, num_workers=1))
assert not hasattr(iterator, "_pin_memory_thread")
del iterator
