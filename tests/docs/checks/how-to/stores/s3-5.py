secret_key = os.environ["AWS_SECRET_ACCESS_KEY"]
access_key = os.environ["AWS_ACCESS_KEY_ID"]
