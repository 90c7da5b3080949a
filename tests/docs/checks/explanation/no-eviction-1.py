from fastload.cli.demo.photos import make_photo
from fastload.images import decode_resized, shrink

photos = [make_photo(seed, quality=97) for seed in range(12)]
for side, kilobytes in ((256, 32), (320, 48)):  # of a photo of 140 KB
    share = sum(len(shrink(photo, side, 90)) for photo in photos) / sum(map(len, photos))
    assert abs(140 * share - kilobytes) < 2, (side, share)
for side, kilobytes in ((256, 262), (320, 409)):
    assert round(decode_resized(photos[0], side).nbytes / 1000) == kilobytes, side

from fastload import CenterCrop, DataLoader, ImageFolder

for _ in DataLoader(ImageFolder("s3://bucket/train", CenterCrop(224), cache="/ssd/cache"), 8):
    pass
