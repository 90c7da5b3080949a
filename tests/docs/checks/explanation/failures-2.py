from fastload import DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop, open_store
from fastload.errors import ObjectChangedError

dataset = ObjectDataset("s3://bucket/spectra")  # listed now
name = dataset.key(0)
open_store("s3://bucket/spectra").write(name, b"another experiment, written over it")
try:
    dataset[0]
except ObjectChangedError as error:
    print(error)  # [get '0000.bin'] the object changed since it was listed (version ...
fresh = ObjectDataset("s3://bucket/spectra", on_change="refresh")
try:
    dataset[0]
    raise AssertionError("no error")
except ObjectChangedError as found:
    assert str(found).startswith("[get '0000.bin'] the object changed since it was listed"), found
    assert "the next run lists it anew" in str(found), found
assert fresh[0] == b"another experiment, written over it"
