from fastload import DataLoader

exact = ImageFolder("s3://bucket/train", RandomResizedCrop(224), cache=Cache("/ssd/cache", "dct"))
first = [images for images, labels in DataLoader(exact, 8)]
plain = ImageFolder("s3://bucket/train", RandomResizedCrop(224), cache=Cache("/ssd/other", "raw"))
assert exact.cache.mode == "dct" and dataset.cache.mode == "auto"
assert exact.contains(0) and not plain.contains(0)
