open_store("s3://bucket/train").write("cat/broken.jpg", b"\xff\xd8\xff not an image")
photos = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
loader = DataLoader(photos, batch_size=25, num_workers=2, on_error="replace")
for images, labels in loader:
    pass
assert len(images) == 25
[(key, said)] = loader.stats()["bad"]
assert key == "cat/broken.jpg" and said.startswith("DecodeError: [decode 'cat/broken.jpg']"), said
from fastload.errors import DecodeError

batches, sizes = iter(DataLoader(photos, 5, num_workers=2)), []
for _ in range(5):
    try:
        sizes.append(len(next(batches)[0]))
    except DecodeError as error:
        sizes.append(error.key)
assert sorted(map(str, sizes)) == ["5"] * 4 + ["cat/broken.jpg"], sizes
