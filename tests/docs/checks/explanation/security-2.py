store = open_store("s3://bucket/train", key="AKIAEXAMPLE", secret="not-for-any-log")
assert repr(store) == "<NativeStore s3://bucket/train>", repr(store)
