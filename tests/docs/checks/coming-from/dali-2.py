assert len(seen) == 2 and seen[0].dtype == torch.float16 and seen[0].shape == (24, 3, 224, 224)
assert loader.stats()["decode"]["decoder"] == "cpu"
