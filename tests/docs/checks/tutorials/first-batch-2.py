assert dataset.classes == ["circle", "square"] and len(dataset) == 96
assert images.shape == (32, 3, 224, 224) and str(images.dtype) == "torch.uint8"
