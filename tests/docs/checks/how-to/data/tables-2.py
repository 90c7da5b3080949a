import pathlib

pathlib.Path("/data/coco").mkdir()
pathlib.Path("/data/coco/instances.json").write_text(
    json.dumps(
        {
            "images": [{"id": n + 50, "file_name": key} for n, key in enumerate(sorted(keys))],
            "annotations": [
                {"image_id": n + 50, "bbox": [1.0, 2.0, 30.0, 40.0], "category_id": 7}
                for n in range(24)
                for _ in range(n % 3)
            ],
        }
    )
)
