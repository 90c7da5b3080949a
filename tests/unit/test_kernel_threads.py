"""Rows of a batch by threads of the kernel: from records of a cache, and from images in memory."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload import Cache, CenterCrop, RandomResizedCrop
from fastload.cache.segment import PLACE, Places
from fastload.formats.sample import dump
from fastload.images import kernel as native
from fastload.images.crop import Crop, _decoders, _map_rows, noted_boxes
from fastload.images.decode import Oriented, to_dct, with_rows
from fastload.images.rng import sample_seeds
from tests.patience import PATIENCE
from tests.photos import pillow_jpeg, png, scene, variants

compiled = native.kernel
pytestmark = pytest.mark.skipif(compiled is None, reason="the kernel is not built")

Placed = Callable[[list[Any]], Places]
THREADS = (0, 1, 2, 5)
PNGS = [png(Image.fromarray(scene(9, 9)))] * 4
SEEDS = sample_seeds(3, 1, np.arange(4096))
CROPS = [
    RandomResizedCrop(32, flip=0.5),
    RandomResizedCrop((9, 40), scale=(0.5, 1.0), ratio=(3.0, 4.0), channels_last=True),
    RandomResizedCrop(16, scale=(1.0, 1.0), ratio=(0.2, 0.3), flip=1.0),
    CenterCrop(24, resize=30),
    CenterCrop((24, 8), resize=(31, 57), channels_last=True),
    CenterCrop(20),
]


@pytest.fixture(autouse=True)
def no_threads_after() -> Iterator[None]:
    yield
    native.active().set_threads(0)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Placed]:
    """Payloads -> where a cache has them."""
    caches = []

    def write(payloads: list[Any]) -> Places:
        cache = Cache(tmp_path / f"cache{len(caches)}", "raw")
        caches.append(cache)
        keys = [cache.key(str(number)) for number in range(len(payloads))]
        for key, payload in zip(keys, payloads, strict=True):
            assert cache.write(key, payload, wait=60)
        assert cache.flush()
        located = cache._locate(keys)
        assert located.here.all()
        return located

    yield write
    for cache in caches:
        cache.close()


def make(crop: Crop, located: Places, *, pixels: bool = False) -> tuple[Any, list[int]]:
    """(the rows, those of them that were not made)."""
    count = len(located.table)
    out = np.zeros((count, *crop.sample_shape), np.uint8)
    rows, seeds = np.arange(count), SEEDS[:count]
    return out, crop._make_rows(out, rows, located.table, seeds, pixels=pixels, owner=located)[0]


def begin(out: Any, table: Any, owner: Any) -> Any:
    """Begin to make all rows as `CROPS[0]` does."""
    count = len(table)
    options: Any = False, False, True, 1 << 30, True
    return native.active().begin_rows(
        out, table, np.arange(count), SEEDS[:count], CROPS[0]._box_law, *options, owner
    )


def finish(job: Any) -> list[int]:
    """Return the rows that were not made."""
    return [row for row, _ in native.active().finish_rows(job)[0]]


def expected(crop: Crop, images: list[Any]) -> tuple[Any, list[int]]:
    """The same in the general way."""
    out = np.zeros((len(images), *crop.sample_shape), np.uint8)
    failures = crop.fill(out, images, SEEDS[: len(images)].tolist())
    return out, [row for row, _ in failures]


def photo(width: int, height: int, seed: int = 0) -> bytes:
    return pillow_jpeg(scene(width, height, seed))


def threads_now() -> list[Path]:
    """All threads of this process."""
    return list(Path("/proc/self/task").iterdir())


def kernel_threads() -> int:
    return sum((task / "comm").read_text() == "fastload-kernel\n" for task in threads_now())


@pytest.mark.parametrize("crop", CROPS, ids=repr)
def test_rows_of_a_cache_are_those_of_fill(crop: Crop, places: Placed) -> None:
    files = [data for shape in ((45, 33), (160, 64)) for data in variants(*shape).values()]
    for form in (bytes, to_dct, with_rows):
        payloads = [form(file) for file in files]
        want, failed = expected(crop, payloads)
        framed = [row for row, file in enumerate(files) if crop_is_framed(crop, file)]
        located = places(payloads)
        for threads in THREADS:
            assert native.active().set_threads(threads) == threads
            got, left = make(crop, located)
            assert left == sorted({*failed, *framed})
            want[left] = 0
            got[left] = 0
            np.testing.assert_array_equal(got, want)


def crop_is_framed(crop: Crop, file: bytes) -> bool:
    width, height = Image.open(BytesIO(file)).size
    return isinstance(crop, CenterCrop) and crop._box_for(width, height, None).inner is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("crop", CROPS, ids=repr)
def test_boxes_are_chosen_as_in_python_for_any_size(crop: Crop, places: Placed) -> None:
    rng = np.random.default_rng(0)
    sizes = [(int(h), int(w)) for h, w in rng.integers(30, 90, (400, 2))] + [(1, 90), (90, 1), (300, 31)]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    want, failed = expected(crop, images)
    assert not failed
    payloads = [dump(image) if row % 2 else dump((image, 6)) for row, image in enumerate(images)]
    got, left = make(crop, places(payloads), pixels=True)
    assert set(left) <= {len(sizes) - 3, len(sizes) - 2, *(k for k, s in enumerate(sizes) if min(s) < 57)}
    if not isinstance(crop, CenterCrop):
        assert not left
    want[left] = 0
    np.testing.assert_array_equal(got, want)


def test_sums_are_those_of_xxhash(places: Placed) -> None:
    assert compiled is not None
    rng = random.Random(0)
    sizes = [
        241,
        255,
        256,
        257,
        1023,
        1024,
        1025,
        1088,
        1089,
        2048,
        2049,
        *rng.choices(range(241, 9000), k=200),
    ]
    located = places([rng.randbytes(size) for size in sizes])
    out = np.zeros((len(sizes), 3, 8, 8), np.uint8)
    set_simd: Any = compiled._set_simd  # type: ignore[attr-defined]
    for simd in (False, True):
        set_simd(simd)
        job = begin(out, located.table, located)
        reasons = {reason for _, reason in compiled.finish_rows(job)[0]}
        assert reasons == {"an image of a format that Python opens"}


def test_a_row_that_is_not_as_promised_is_left_and_spoils_no_other(tmp_path: Path, places: Placed) -> None:
    file = photo(64, 48)
    damaged = bytearray(file)
    damaged[len(file) // 2 : len(file) // 2 + 40] = b"\xff\xc4" * 20
    payloads = [
        file,
        png(Image.open(BytesIO(file))),
        file[: len(file) // 2],
        b"x" * 300,
        b"",
        bytes(damaged),
        file,
    ]
    located = places(payloads)
    native.active().set_threads(2)
    got, left = make(CROPS[0], located)
    assert left == [1, 2, 3, 4, 5]
    want, _ = expected(CROPS[0], [file] * 7)
    np.testing.assert_array_equal(got[[0, 6]], want[[0, 6]])
    # As pixels: none of these is.
    assert make(CROPS[0], located, pixels=True)[1] == list(range(7))
    # A bit in each field of a place that is not as it was, a length beyond all memory, other bytes on the
    # disk, and a file that ends before the record.
    for name, (_, start, *_) in (PLACE.fields or {}).items():
        table = located.table.copy()
        table.view(np.uint8).reshape(len(table), -1)[0, start] ^= 1
        assert make(CROPS[0], located._replace(table=table))[1] == [0, 1, 2, 3, 4, 5], name
    table = located.table[:1].copy()
    table["length"] = 2**63
    assert make(CROPS[0], located._replace(table=table))[1] == [0]
    (segment,) = (tmp_path / "cache0/v1/segments").iterdir()
    with segment.open("r+b") as opened:
        opened.seek(int(located.table["offset"][6]) + 64 + 100)
        opened.write(b"\0\1\2")
    assert 6 in make(CROPS[0], located)[1]
    os.truncate(segment, 100)
    assert make(CROPS[0], located)[1] == list(range(7))


def test_what_python_has_to_choose_or_to_note_is_left(places: Placed) -> None:
    class Own(RandomResizedCrop):
        def _box_for(self, width: int, height: int, rng: Any) -> Any:
            return super()._box_for(width, height, rng)

    located = places([photo(64, 48)] * 2)
    for crop in (Own(8), RandomResizedCrop(8, interpolation="nearest"), CenterCrop(8, channels=1)):
        assert make(crop, located)[1] == [0, 1]
    with noted_boxes([]):
        assert make(CROPS[0], located)[1] == [0, 1]


def test_without_the_kernel_all_rows_are_left(places: Placed, monkeypatch: pytest.MonkeyPatch) -> None:
    located = places([photo(64, 48)] * 2)
    monkeypatch.setattr(native, "kernel", None)
    assert native.active().set_threads(3) == 0
    native.active().read_ahead(located.table)
    assert make(CROPS[0], located)[1] == [0, 1]


def test_crop_resize_gives_the_same_with_any_number_of_threads() -> None:
    files = [file for shape in ((45, 33), (90, 70)) for file in variants(*shape).values()]
    bad = [b"no image", files[0][:50]]
    images = [image for image in [*files, *bad] for _ in range(3)]
    want, failed = expected(CROPS[0], images)
    assert len(failed) == 6
    for threads in THREADS:
        native.active().set_threads(threads)
        got, left = expected(CROPS[0], images)
        assert left == failed
        want[failed] = got[failed] = 0
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fails_here", [True, False])
def test_no_thread_writes_rows_after_the_error_of_another(
    fails_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of such a batch goes to another one."""
    monkeypatch.setattr("fastload.images.crop.threads", lambda: 2)
    begun, ended, both, here = list[int](), list[int](), threading.Barrier(2), threading.current_thread()

    def make(row: int) -> None:
        begun.append(row)
        if row < 2:
            both.wait(PATIENCE)
        if (threading.current_thread() is here) == fails_here:
            ended.append(row)
            raise MemoryError
        time.sleep(0.1)
        ended.append(row)

    with pytest.raises(MemoryError):
        _map_rows(make, PNGS)
    assert sorted(begun) == sorted(ended)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("failing", [None, 0, 3])
def test_rows_are_made_where_no_thread_can_be_started(
    most: int, failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes. No call stays in a queue, with the rows of a batch that is gone."""
    monkeypatch.setattr("fastload.images.crop.threads", lambda: 4)
    _decoders.cache_clear()
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def make(row: int) -> int:
        if row == failing:
            raise MemoryError
        return row

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start_some)
        if failing is None:
            assert _map_rows(make, PNGS) == [0, 1, 2, 3]
        else:
            with pytest.raises(MemoryError):
                _map_rows(make, PNGS)
    for thread in started:
        _decoders.cache_clear()  # so that it ends
        thread.join()
    kept = weakref.ref(make)
    del make
    gc.collect()
    assert kept() is None
    assert _map_rows(lambda row: row, PNGS) == [0, 1, 2, 3]


def test_threads_are_as_many_as_asked_for_and_end() -> None:
    kernel = native.active()
    for count in (3, 5, 1, 0, 2, 0):
        assert kernel.set_threads(count) == count
        deadline = time.monotonic() + 30
        while kernel_threads() != count and time.monotonic() < deadline:  # a thread names itself
            time.sleep(0.01)
        assert kernel_threads() == count
    for count in (-1, 257):
        with pytest.raises(ValueError, match="from 0 to 256"):
            kernel.set_threads(count)
    # Nothing stays: neither stacks nor tables.
    before = len(threads_now())
    for _ in range(50):
        kernel.set_threads(4)
        expected(CROPS[0], [photo(64, 48)] * 4)
        kernel.set_threads(0)
    assert len(threads_now()) == before


def test_jobs_may_overlap_be_dropped_and_outlive_the_threads(places: Placed) -> None:
    kernel = native.active()
    located = places([photo(200, 160, seed) for seed in range(24)])
    want, _ = make(CROPS[0], located)
    kernel.set_threads(2)
    outs = [np.zeros_like(want) for _ in range(6)]
    jobs: list[Any] = [begin(out, located.table, located) for out in outs]
    jobs[1] = None  # its rows are not waited for, and no memory of it is written from here on
    outs[1][:] = 0
    kernel.set_threads(0)
    for job, out in zip(jobs, outs, strict=True):
        if job is not None:
            assert finish(job) == []
            np.testing.assert_array_equal(out, want)
            assert finish(job) == []  # asked again, it says the same
    assert not outs[1].any()


def test_a_job_keeps_its_segments_open(places: Placed) -> None:
    located = places([photo(200, 160)] * 8)
    want, _ = make(CROPS[0], located)
    out, table, owner = np.zeros_like(want), located.table.copy(), located.readers
    fd = owner[0].fd
    job = begin(out, table, owner)
    table[:] = np.zeros((), PLACE)  # copied when the job began
    assert sys.getrefcount(owner) > 3
    os.fstat(fd)
    assert finish(job) == []
    np.testing.assert_array_equal(out, want)


def test_threads_of_python_share_the_pool(places: Placed) -> None:
    located = places([photo(100, 80, seed) for seed in range(16)])
    want, _ = make(CROPS[0], located)
    native.active().set_threads(3)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(20):
            got, left = make(CROPS[0], located)
            if left or not (got == want).all():
                wrong.append((number, turn, left))
            if number == 0:
                native.active().set_threads(turn % 4)

    team = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("threads", [0, 2])
def test_a_forked_child_has_no_threads_and_no_jobs(threads: int, places: Placed) -> None:
    located = places([photo(200, 160, seed) for seed in range(16)])
    want, _ = make(CROPS[0], located)
    native.active().set_threads(threads)
    out = np.zeros_like(want)
    job = begin(out, located.table, located)
    child = os.fork()
    if child == 0:
        try:
            assert kernel_threads() == 0
            with pytest.raises(RuntimeError, match="before a fork"):
                finish(job)
            del job
            for count in (0, 2):
                native.active().set_threads(count)
                got, left = expected(CROPS[0], [photo(200, 160, seed) for seed in range(16)])
                assert not left
                assert (got == want).all()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert finish(job) == []
    np.testing.assert_array_equal(out, want)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_can_have_as_many_threads_as_its_parent() -> None:
    native.set_threads(2)
    child = os.fork()
    if child == 0:
        before = len(threads_now())
        os._exit(native.threads() or native.set_threads(2) != 2 or len(threads_now()) != before + 2)
    native.set_threads(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_signal_is_handled_after_the_wait(places: Placed) -> None:
    located = places([photo(500, 400, seed) for seed in range(8)])
    native.active().set_threads(2)
    want, _ = make(CROPS[0], located)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            got, left = make(CROPS[0], located)
            assert not left
            np.testing.assert_array_equal(got, want)
        assert seen
    finally:
        signal.signal(signal.SIGUSR1, before)


WRONG = [
    ({"places": np.zeros(3, PLACE)}, ValueError, "as many"),
    ({"rows": np.array([0, 2])}, IndexError, "row 2 of an out of 2"),
    ({"rows": np.array([-1, 0])}, IndexError, "row -1"),
    ({"law": ("left", 1.0, 1.0)}, ValueError, "'random' or 'centre'"),
    ({"law": ["random"]}, TypeError, "a law is a tuple"),
    ({"out": np.zeros((2, 4, 8, 8), np.uint8)}, ValueError, "out must be uint8"),
    ({"out": np.zeros((2, 3, 8, 8), np.uint8)[:, :, :, ::2]}, ValueError, "contiguous"),
]


@pytest.mark.parametrize("changed, error, words", WRONG, ids=[words for _, _, words in WRONG])
def test_arguments_of_begin_rows_are_checked(changed: Any, error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros((2, 3, 8, 8), np.uint8),
        "places": np.zeros(2, PLACE),
        "rows": np.arange(2),
        "seeds": SEEDS[:2],
        "law": CROPS[0]._box_law,
    }
    with pytest.raises(error, match=words):
        native.active().begin_rows(*(arguments | changed).values(), False, False, True, 1 << 30, True, None)


def test_oriented_pixels_are_taken_as_they_lie(places: Placed) -> None:
    image = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)
    want, _ = expected(CROPS[0], [Oriented(image, 6)])
    got, left = make(CROPS[0], places([dump((image, 6))]), pixels=True)
    assert not left
    np.testing.assert_array_equal(got, want)
    # What looks nearly like pixels is left.
    odd = [
        image[..., :1],
        image[..., 0],
        image.astype(np.int8),
        (image, image),
        [image],
        (image, "six"),
        image.tolist(),
    ]
    assert make(CROPS[0], places([dump(value) for value in odd]), pixels=True)[1] == list(range(len(odd)))
