import fastload
from fastload import DataLoader, ImageFolder, RandomResizedCrop, open_store

open_store("s3://bucket/train").write("cat/0002.jpg", b"<html>404</html>")
transform = RandomResizedCrop(224)
dataset = ImageFolder("s3://bucket/train", transform)
