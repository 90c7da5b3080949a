assert images.shape[1:] == (3, 64, 64) and captions.shape == (len(images), 24)
assert bytes(captions[0][captions[0] > END].sub(2).tolist()).startswith(b"a photo of num")
assert set(batch["json"].tolist()) == {320}
dataset.close()
