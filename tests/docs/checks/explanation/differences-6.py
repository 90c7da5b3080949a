assert train[0][0].dtype == torch.uint8 and train[0][0].shape == (3, 64, 64)
with pytest.raises(ArgumentError):
    RandomResizedCrop(224, interpolation="bicubic")
