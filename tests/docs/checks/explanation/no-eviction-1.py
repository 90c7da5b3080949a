from fastload.cli.demo.photos import make_photo
from fastload.images import decode_resized

for side, kilobytes in ((256, 262), (320, 409)):
    assert round(decode_resized(make_photo(0), side).nbytes / 1000) == kilobytes, side

from fastload import CenterCrop, DataLoader, ImageFolder

for _ in DataLoader(ImageFolder("s3://bucket/train", CenterCrop(224), cache="/ssd/cache"), 8):
    pass
