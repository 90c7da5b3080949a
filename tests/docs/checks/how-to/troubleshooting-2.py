import fastload

loader = fastload.DataLoader(fastload.ImageFolder("/data/train", fastload.RandomResizedCrop(32)), 8)
for _ in loader:
    pass
