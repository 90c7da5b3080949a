import json
import fastload

bucket, train = fastload.open_store("s3://bucket"), fastload.open_store("s3://bucket/train")
keys = [info.key for page in train.list() for info in page]
lines, rows, boxes = ["image,label,price,caption"], [], []
for number, key in enumerate(sorted(keys)):
    bucket.write(f"photos/{number:04d}.jpg", bytes(train.read(key)))
    lines.append(f"{key},{number % 2},{number / 4},photo {number}")
    rows.append(f"{number:04d},{number % 3}")
    boxes.append(
        json.dumps(
            {"image": key, "boxes": [[1.0, 2.0, 30.0, 40.0]] * (number % 3), "kinds": [7] * (number % 3)}
        )
    )
bucket.write("labels.csv", "\n".join(lines).encode())
bucket.write("ids.csv", "\n".join(["id,quality", *rows]).encode())
bucket.write("boxes.jsonl", "\n".join(boxes).encode())
