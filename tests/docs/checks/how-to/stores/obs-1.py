import os

ak, sk = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
from fastload import ImageFolder, RandomResizedCrop, open_store

transform = RandomResizedCrop(224)
