"""The two forms of a sample: members of a WebDataset tar, and features of a tf.train.Example.

    member                      feature
    KEY.jpg, .png, .webp, ...   image: bytes       a sample's only image; its bytes say what it is
    KEY.jpg, .seg.png, ...      jpg, seg.png, ...: bytes                    several images
    KEY.cls                     label: int
    KEY                         key: bytes
    KEY.json, .txt, .npy, ...   json, txt, npy, ...: bytes

and back: other names of images get their kind behind them ("mask" -> KEY.mask.png), one byte string is a
member of the feature's name, several are numbered, numbers are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from xxhash import xxh3_64

from fastload.errors import DecodeError
from fastload.formats.tar import TarWriter, read_sample
from fastload.formats.tfrecord import TFRecordWriter, encode_example, read_example
from fastload.shards.formats import TAR, TFRECORD

# Pillow's name of a format -> the extension of its members.
_EXTENSIONS = {
    "JPEG": "jpg", "PNG": "png", "WEBP": "webp", "AVIF": "avif", "HEIF": "heic", "GIF": "gif", "BMP": "bmp",
    "TIFF": "tif", "PPM": "ppm",
}  # fmt: skip
_IMAGE_FEATURES = ("image", "image/encoded", "image_raw")
_LABEL_FEATURES = ("label", "image/class/label")


class Sample(NamedTuple):
    """One sample between source and shard. With `record`, the Example that was read, `members` is empty.

    Args:
        key: "" if the source has none.
        members: extension -> bytes.
        record: a view, or None.
        size: its bytes in the source.
    """

    key: str
    members: Mapping[str, Any]
    record: Any = None
    size: int = 0


class Digest:
    """A running checksum of samples, to compare what is read with what was to be written."""

    def __init__(self) -> None:
        self._hash = xxh3_64()

    def add(self, name: str, content: Any) -> None:
        self._hash.update(f"{len(name)} {name} {len(content)} ".encode("utf-8", "backslashreplace"))
        self._hash.update(content)

    def add_members(self, key: str, members: Mapping[str, Any]) -> None:
        self.add(key, b"")
        for extension, content in members.items():
            self.add(extension, content)

    def add_features(self, features: Mapping[str, Any]) -> None:
        """Add features, as `encode_example` takes them or as `read_example` returns them."""
        self.add("", b"")
        for name in sorted(features):
            value = features[name]
            if not isinstance(value, int | bytes | memoryview) and len(value) == 1:
                value = value[0]
            self.add(name, value if isinstance(value, bytes | memoryview) else str(value).encode())

    def text(self) -> str:
        return str(self._hash.hexdigest())


def split_name(name: str) -> tuple[str, str]:
    """Return (what a member's key is made from, extension) of an object's key."""
    stem, dot, extension = name.rpartition(".")
    extension = extension.lower()
    if dot and stem and not stem.endswith("/") and re.fullmatch("[a-z0-9_-]{1,16}", extension):
        return stem, extension
    return name, "bin"


def member_key(name: str) -> str:
    """Return `name` as the key of a member: no white space, no dot in its last component, plain UTF-8.

    Programs that extract a tar may take its names as they are. So it leads to no place outside of a folder
    (nothing of "", "." and ".." between its slashes, no backslash), and it has no control characters.
    """
    text = name.encode("utf-8", "backslashreplace").decode().replace("\\", "_")
    text = "".join(filter(str.isprintable, re.sub(r"\s", "_", text)))
    parts = [part for part in text.replace("__MACOSX/", "_MACOSX/").split("/") if part not in ("", ".", "..")]
    if len(parts) > 1 and re.fullmatch("__.*__", parts[0]):  # WebDataset passes over all of such a folder
        parts[0] = parts[0][1:]
    *directories, last = parts or ["_"]
    return "/".join([*directories, last.replace(".", "_")])


def as_features(sample: Sample) -> dict[str, Any]:
    """Return the features of a sample of members, for `encode_example`.

    Raises:
        DecodeError: two of its members would be the same feature.
    """
    from fastload.datasets.sample_files import IMAGES  # it imports torch

    features: dict[str, Any] = {"key": sample.key.encode("utf-8", "surrogateescape")}
    images = [extension for extension in sample.members if extension in IMAGES]
    for extension, content in sample.members.items():
        name, value = extension, content
        if extension == "cls" and re.fullmatch(rb"\s*-?[0-9]{1,18}\s*", content):
            name, value = "label", int(bytes(content))
        elif images == [extension]:  # with a mask beside it, the name says which is which
            name = "image"
        if name in features:
            raise DecodeError(f"member {extension!r} would be a second feature {name!r}", key=sample.key)
        features[name] = value
    return features


def as_members(sample: Sample) -> Sample:
    """Return the members of a sample that came as an Example.

    Raises:
        DecodeError: it is no Example, or two of its features would be the same member.
    """
    key, members = "", dict[str, Any]()
    for name, values in read_example(sample.record).items():
        if name == "key" and isinstance(values, list) and len(values) == 1:
            key = bytes(values[0]).decode("utf-8", "surrogateescape")
            continue
        for extension, content in _members(name, values).items():
            if extension in members:
                raise DecodeError(f"two features of the Example would be member {extension!r}", key=key)
            members[extension] = content
    return Sample(key, members, None, sample.size)


def _members(name: str, values: Any) -> dict[str, Any]:
    from fastload.datasets.sample_files import IMAGES  # it imports torch

    plain = re.sub(r"[^a-z0-9_.-]", "_", name.lower()).strip(".") or "_"
    if not isinstance(values, list):
        if name in _LABEL_FEATURES and len(values) == 1 and values.dtype == "int64":
            return {"cls": str(values[0]).encode()}
        return {f"{plain}.json": json.dumps(values.tolist()).encode()}
    if len(values) == 1:
        extension = _image_kind(values[0])
        if extension and name in _IMAGE_FEATURES:
            return {extension: values[0]}
        if extension and plain.rpartition(".")[2] not in IMAGES:
            return {f"{plain}.{extension}": values[0]}
        return {plain: values[0]}
    return {f"{plain}.{number}": value for number, value in enumerate(values)} or {f"{plain}.json": b"[]"}


def _image_kind(content: Any) -> str:
    """Return the extension of an encoded image; "" for other bytes."""
    from fastload.images.decode import find_format  # it imports torch

    try:
        return _EXTENSIONS[find_format(content)[1]]
    except DecodeError:
        return ""


class Members:
    """The form of WebDataset.

    Attributes:
        format: of the shards.
        writer: makes what writes records into a file.
    """

    format = TAR
    writer: Any = TarWriter

    @property
    def copied(self) -> Form:
        """The form of shards whose samples come in this form already."""
        return self

    def file_name(self, name: str, number: int, count: int | None) -> str:
        """Return the name of a shard; `count` is None where their number is not known before."""
        return f"{name}-{number:06d}.tar"

    def read(self, payload: Any) -> Sample:
        """Return the sample in a record."""
        return Sample(*read_sample(payload), None, len(payload))

    def write(self, writer: Any, sample: Sample, serial: str, keys: dict[str, str], content: Digest) -> None:
        """Write a sample, and add it to the digest.

        Args:
            serial: its key, where it has none.
            keys: key in the shard -> key in the source, of all samples of the shard.
        """
        if sample.record is not None:
            sample = as_members(sample)
        given = sample.key or serial
        key = member_key(given)
        while key in keys:  # twice in the source, or the same except for its dots
            key = f"{key}-{serial}"
        keys[key] = given
        content.add_members(key, sample.members)
        writer.write(key, sample.members)

    def add_read(self, content: Digest, payload: Any) -> None:
        """Add a record that is read to the digest, as `write` did before it was written."""
        content.add_members(*read_sample(payload))


class Examples:
    """The form of TensorFlow, whose files have their count in their names, where it is known."""

    format = TFRECORD
    writer: Any = TFRecordWriter

    @property
    def copied(self) -> Form:
        return CopiedRecords()

    def file_name(self, name: str, number: int, count: int | None) -> str:
        return f"{name}-{number:05d}{'' if count is None else f'-of-{count:05d}'}.tfrecord"

    def read(self, payload: Any) -> Sample:
        return Sample("", {}, payload, len(payload))

    def write(self, writer: Any, sample: Sample, serial: str, keys: dict[str, str], content: Digest) -> None:
        features = as_features(sample._replace(key=sample.key or serial))
        content.add_features(features)
        writer.write(encode_example(features))

    def add_read(self, content: Digest, payload: Any) -> None:
        content.add_features(read_example(payload))


class CopiedRecords(Examples):
    """The records of TFRecord files, whatever they hold."""

    def write(self, writer: Any, sample: Sample, serial: str, keys: dict[str, str], content: Digest) -> None:
        content.add("", sample.record)
        writer.write(sample.record)

    def add_read(self, content: Digest, payload: Any) -> None:
        content.add("", payload)


Form = Members | Examples
_FORMS: tuple[Form, ...] = (Members(), Examples())
FORMS: Mapping[str, Form] = {form.format.name: form for form in _FORMS}
