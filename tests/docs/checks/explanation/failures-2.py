try:
    dataset[0]
    raise AssertionError("no error")
except ObjectChangedError as found:
    assert str(found).startswith("[get '0000.bin'] the object changed since it was listed"), found
assert fresh[0] == b"another experiment, written over it"
