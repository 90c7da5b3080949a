assert len(next(iter(loader))[1]) == 24
os.environ |= {
    "AWS_ENDPOINT_URL": options["endpoint_url"],
    "AWS_ACCESS_KEY_ID": options["key"],
    "AWS_SECRET_ACCESS_KEY": options["secret"],
}
