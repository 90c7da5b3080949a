store = open_store("s3://bucket/train", **obs)
assert "obs.cn-north-4.myhuaweicloud.com" in store.identity and sk not in repr(store)
try:
    open_store("obs://bucket/train")
except ValueError as error:
    assert "Huawei OBS is read as s3://" in str(error)
obs["endpoint_url"] = os.environ["AWS_ENDPOINT_URL"]
