from fastload import ImageFolder, RandomResizedCrop, open_store
from fastload.errors import DecodeError

open_store("s3://bucket/pages").write("cat/a.jpg", b"<html>404</html>")
try:
    ImageFolder("s3://bucket/pages", RandomResizedCrop(224))[0]
except DecodeError as error:
    said = str(error)  # [decode 'cat/a.jpg'] this is HTML or XML, not an image: ...
assert "HTML or XML" in said, said

import io
import tarfile

import pytest

from fastload import DataLoader, ObjectDataset, TarDataset
from fastload.errors import ArgumentError, NotFoundError

with pytest.raises(ArgumentError, match="pipe:"):
    TarDataset("pipe:touch /data/owned")
tar = io.BytesIO()
with tarfile.open(fileobj=tar, mode="w") as writer:
    for name, body in (
        ("../../0.pkl", b"cos\nsystem\n(S'touch owned'\ntR."),
        ("1.npy", b"\x93NUMPY\x01\x00"),
    ):
        member = tarfile.TarInfo(name)
        member.size = len(body)
        writer.addfile(member, io.BytesIO(body))
open_store("s3://bucket/hostile").write("0.tar", tar.getvalue())
loader = DataLoader(TarDataset("s3://bucket/hostile"), None, collate_fn=lambda sample: sample)
batches = iter(loader)
for words in ("pickle, which can run any code", "not what its extension says"):
    with pytest.raises(DecodeError, match=words):
        next(batches)
with pytest.raises(NotFoundError, match="cannot be read"):
    open_store("s3://bucket/train").read("../val/cat/0000.jpg")
