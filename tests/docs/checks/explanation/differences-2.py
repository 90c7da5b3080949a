assert train.samples[0] == ("cat/0000.jpg", 0) and train.targets[0] == 0
with pytest.raises((TypeError, AttributeError, ArgumentError)):
    train.samples[0] = ("x", 1)
for name in ("loader", "is_valid_file", "samples", "url", "cache", "decode", "on_change"):
    with pytest.raises(ArgumentError):
        setattr(train, name, None)
with pytest.raises(ArgumentError):
    type("Own", (ImageFolder,), {"find_classes": lambda self, directory: None})("s3://bucket/train")
train.transform = RandomResizedCrop(64)
