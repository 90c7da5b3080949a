import os

ak, sk = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
endpoint = os.environ["AWS_ENDPOINT_URL"]  # https://obs.cn-north-4.myhuaweicloud.com
