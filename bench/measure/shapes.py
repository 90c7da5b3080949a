"""Every shape of data: the same photos in each, beside the format's own loader, in turns.

`python -m bench shapes [--images 1000] [--turns 5] [--seconds 3] [--only NAME]`. Photos of
138 KB, 2 workers, RandomResizedCrop(224) and flip to uint8 in batches of 64. First epochs are read from an S3
server 20 ms away on the same cores, with empty caches and new workers. In later ones fastload reads its own
cache in mode "raw", and the others what they keep or read on the local disk. Each turn begins with another
side.

The work differs: a pair has a mask beside its photo; WebDataset, Hugging Face datasets, Streaming and LitData
decode the whole photo by Pillow, FFCV by the fast DCT. The others need environments of their own, which are
made where they are missing; one that cannot be made is left out. The mixture is of ImageFolder, LitData's
chunks and MDS shards.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.command import begin, finish, make_parser
from bench.data import BATCH, ROUND_TRIP, SIZE, WORKERS, make_shards, photo_folder
from bench.peers.environment import Unavailable
from bench.peers.peer import Peer
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

ROWS_A_GROUP = 100  # of the Parquet file, as Hugging Face writes images
BETON = "jpg 97 9999"  # the mode of FFCV's script, which is part of the name of its file


class Own(NamedTuple):
    """The loader that a format comes from: its script and mode, and whether it reads S3."""

    script: str
    mode: str = ""
    reads_s3: bool = True


class Shape(NamedTuple):
    """Our source in `bench/peers/scripts/ours.py`, and the format's own loader, if there is one.

    epochs: until the cache has every sample.
    """

    source: str
    own: Own | None = None
    epochs: int = 1


SHAPES = {
    "a folder a class": Shape("s3", Own("torch_files", reads_s3=False)),
    "table": Shape("table"),
    "image and mask": Shape("pair"),
    "tar": Shape("tar", Own("webdataset")),
    "Parquet": Shape("parquet", Own("huggingface")),
    "MDS": Shape("mds", Own("mosaicml")),
    "LitData": Shape("litdata", Own("litdata", "chunks")),
    ".beton": Shape("beton", Own("ffcv", BETON, reads_s3=False)),
    "mixture of three": Shape("mixture", epochs=3),
}
WRITERS = ("mosaicml", "litdata", "ffcv")  # these write their files themselves


def make_data(photos: Path, count: int, console: Console) -> set[str]:
    """The photos in every form, before the server starts, which keeps its listings; the missing scripts."""
    make_shards(photos, count, "tar")
    make_pairs(photos)
    make_parquet(photos)
    missing = set()
    for shape in SHAPES.values():
        if shape.own is not None and shape.own.script in WRITERS:
            job = {"prepare": True, "folder": str(photos), "size": SIZE, "batch": BATCH}
            try:
                Peer(shape.own.script, job | {"mode": shape.own.mode}).close()
            except Unavailable as error:
                console.print(f"[red]left out: {shape.own.script}: {error}[/]")
                missing.add(shape.own.script)
    made, bucket = Path(f"{photos}-{'-'.join(BETON.split())}.beton"), Path(f"{photos}-beton")
    if made.exists() and not bucket.exists():
        bucket.mkdir()
        (bucket / made.name).hardlink_to(made)
    return missing


def labelled(photos: Path) -> list[tuple[Path, int]]:
    folders = sorted(path for path in photos.iterdir() if path.is_dir())
    return [(path, label) for label, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]


def make_pairs(photos: Path) -> None:
    """A bucket of photos and masks, with the table of these and the labels in it."""
    from PIL import Image

    folder = Path(f"{photos}-pairs")
    if folder.exists():
        return
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("photos", "masks"):
        (unfinished / part).mkdir(parents=True)
    with (unfinished / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "mask", "label"))
        for number, (path, label) in enumerate(labelled(photos)):
            image, mask = f"photos/{number:06d}.jpg", f"masks/{number:06d}.png"
            (unfinished / image).hardlink_to(path)
            Image.open(path).convert("L").point(lambda value: value // 16).save(unfinished / mask)
            rows.writerow((image, mask, label))
    unfinished.rename(folder)


def make_parquet(photos: Path) -> None:
    """One file, its images as Hugging Face keeps them."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(f"{photos}-parquet")
    if folder.exists():
        return
    unfinished = folder.with_suffix(".part")
    unfinished.mkdir(exist_ok=True)
    rows = [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "label": label}
        for path, label in labelled(photos)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, unfinished / "photos.parquet", row_group_size=ROWS_A_GROUP)
    unfinished.rename(folder)


def measure(shape: Shape, job: dict[str, Any], turns: int, seconds: float) -> dict[str, list[float]]:
    """Images/s of each turn, of the sides "ours" and "theirs", as far as they take part."""
    mode = "raw" if job["later"] else "none"
    wanted = {"ours": ("ours", f"{shape.source} {mode}")}
    if shape.own is not None and (job["later"] or shape.own.reads_s3):
        wanted["theirs"] = (shape.own.script, shape.own.mode)
    rates: dict[str, list[float]] = {side: [] for side in wanted}
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        sides = {}
        for side, (script, own_mode) in wanted.items():
            Path(scratch, side).mkdir()
            peer = Peer(script, job | {"mode": own_mode, "scratch": str(Path(scratch, side))})
            sides[side] = stack.enter_context(peer)
        if job["later"]:  # caches are filled, and what is compiled or mapped once
            for peer in list(sides.values()) * shape.epochs:
                peer.epoch()
        names = list(sides)
        for turn in range(turns):
            for side in names[turn % len(names) :] + names[: turn % len(names)]:
                rates[side].append(round(sides[side].epoch(seconds).rate, 1))
    return rates


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of an epoch at most")
    parser.add_argument("--only", choices=list(SHAPES), action="append", help="these shapes; repeatable")
    given = parser.parse_args()
    console, rows = Console(width=110), []
    document = begin("shapes") | {"images": given.images}
    photos = photo_folder(given.images)
    missing = make_data(photos, given.images, console)
    common = {"folder": str(photos), "size": SIZE, "batch": BATCH, "workers": WORKERS}
    chosen = {name: shape for name, shape in SHAPES.items() if given.only is None or name in given.only}
    with serve_s3(photos.parent) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        access = {"bucket": photos.name, "endpoint": proxy.url, "key": server.key, "secret": server.secret}
        for later in (False, True):
            epoch = "later" if later else "first"
            for name, shape in chosen.items():
                if shape.own is not None and shape.own.script in missing:
                    continue
                job = common | access | {"later": later}
                try:
                    rates = measure(shape, job, given.turns, given.seconds)
                except Unavailable as error:
                    console.print(f"[red]left out: {name}, {epoch}: {error}[/]")
                    continue
                rows.append({"shape": name, "epoch": epoch, "rates": rates})
                console.print(f"{name}, {epoch}: {rates}")
    finish(document | {"rows": rows}, given.results)
