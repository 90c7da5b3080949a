from fastload import DataLoader, ImageFolder, RandomResizedCrop, TarDataset


def requests(dataset, epochs=2):
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=2)
    for _ in range(epochs):
        for _ in loader:
            pass
    return loader.stats()["counters"].get("get.requests", 0)


assert requests(ImageFolder("s3://bucket/train", RandomResizedCrop(64))) == 2 * 24
assert requests(ImageFolder("s3://bucket/train", RandomResizedCrop(64), cache="/ssd/cache")) == 24
shards = requests(
    TarDataset("s3://bucket/shards/train-{00000..00003}.tar", transform=RandomResizedCrop(64)), 1
)
assert shards <= 8, shards
