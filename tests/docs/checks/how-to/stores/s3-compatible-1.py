options = {
    "endpoint_url": os.environ.pop("AWS_ENDPOINT_URL"),
    "key": os.environ.pop("AWS_ACCESS_KEY_ID"),
    "secret": os.environ.pop("AWS_SECRET_ACCESS_KEY"),
}
