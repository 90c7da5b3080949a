for images, labels in DataLoader(dataset, 24, num_workers=2):
    assert len(labels) == 24
