import os

from fastload import open_store

store = open_store("s3://bucket/train", **obs)
assert "obs.cn-north-4.myhuaweicloud.com" in store.identity and "SECRET" not in repr(store)
try:
    open_store("obs://bucket/train")
except ValueError as error:
    assert "Huawei OBS is read as s3://" in str(error)
obs = {
    "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
    "key": os.environ["AWS_ACCESS_KEY_ID"],
    "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
}
