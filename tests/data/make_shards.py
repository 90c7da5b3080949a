"""Makes the TFRecord files beside it with TensorFlow's own writer; tests only import what is in them.

python3 -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu==2.21.0
/tmp/tf/bin/python tests/data/make_shards.py            # writes the files
/tmp/tf/bin/python tests/data/make_shards.py FILE...    # reads files of ours: one JSON line a record
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = {"": "tensorflow.tfrecord", "GZIP": "tensorflow.tfrecord.gz", "ZLIB": "tensorflow.tfrecord.zlib"}
COUNT = 12


def features(number: int) -> dict[str, Any]:
    """What record `number` holds: every kind of list, with no, one and several values, and all of int64."""
    return {
        "image": [bytes((number * 31 + i * i) % 256 for i in range(100 + 40 * number))],
        "label": [number % 3],
        "key": [f"class_{number % 3}/ä {number}".encode()],
        "box": [0.5 * number, -1.0, 3.25],
        "counts": [-(2**63), -number, 0, 127, 128, 2**63 - 1],
        "words": [b"", b"one", b"two" * number],
        "no floats": [] if number % 2 else [1.5],
    }


def write() -> None:
    import tensorflow as tf

    def feature(values: list[Any]) -> Any:
        if values and isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if values and isinstance(values[0], int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    for compression, name in FILES.items():
        options = tf.io.TFRecordOptions(compression_type=compression)
        with tf.io.TFRecordWriter(str(HERE / name), options) as writer:
            for number in range(COUNT):
                named = {key: feature(values) for key, values in features(number).items()}
                writer.write(
                    tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString(
                        deterministic=True
                    )
                )


def read(path: str) -> None:
    import tensorflow as tf

    for record in tf.data.TFRecordDataset(path):
        example = tf.train.Example.FromString(record.numpy())
        found: dict[str, Any] = {}
        for name, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            values = list(getattr(feature, kind).value) if kind else []
            found[name] = [
                {"base64": base64.b64encode(one).decode()} if isinstance(one, bytes) else one
                for one in values
            ]
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        read(argument)
    if not sys.argv[1:]:
        write()
