"""Decoding by DALI. Here its CPU operators; what needs a GPU is in tests/gpu/."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.gpu.dali import Dali, why_no_dali
from fastload.images import CenterCrop, RandomResizedCrop
from fastload.images.encoded import EncodedBatch, EncodedImages, decode_by_kernel
from fastload.metrics.counters import Counters
from tests.encodedimages import encode, psnr, undecodable
from tests.photos import pillow_jpeg, png, scene, variants

if why_no_dali() is not None:
    pytest.skip(str(why_no_dali()), allow_module_level=True)

from fastload.gpu.dali import DaliDecoder, _threads

CPU = torch.device("cpu")
GOOD = pillow_jpeg(scene(96, 72))


def _decoder(on_error: str = "raise", **options: int) -> DaliDecoder:
    return DaliDecoder(CPU, on_error, Counters(), [], Dali(**{"threads": 2} | options))


def _batches(bad: set[int], count: int = 8) -> list[EncodedImages]:
    """Batches of three images; in the batches of `bad`, no decoder can decode the middle one."""
    return [
        encode(
            RandomResizedCrop(24, flip=0.5),
            {f"{k}a": GOOD, f"{k}b": undecodable(GOOD) if k in bad else GOOD, f"{k}c": GOOD},
            seed=10 * k,
        )
        for k in range(count)
    ]


@pytest.mark.parametrize("seed", [0, pytest.param(100, marks=pytest.mark.stress)])
@pytest.mark.parametrize(
    ("crop", "least"),
    [
        (RandomResizedCrop(64, flip=0.5), 50),
        (RandomResizedCrop((160, 120), flip=0.5), 50),
        (CenterCrop(96, resize=110), 50),
        (CenterCrop((48, 96), resize=140), 50),
        (CenterCrop(96), 50),
        # The kernel decodes at a smaller scale where the crop is that small: see test_kernel.
        (RandomResizedCrop((20, 30), channels_last=True, flip=0.5), 35),
    ],
)
def test_the_same_images_as_the_kernel(crop: RandomResizedCrop | CenterCrop, least: float, seed: int) -> None:
    """Every kind of JPEG and a PNG, every box and flip: within `least` dB of the CPU path."""
    encoded = encode(crop, variants() | {"png": png_of(60, 50)}, seed)
    decoder = _decoder()
    images = decoder.start(encoded)()
    expected, _ = decode_by_kernel(encoded, "raise")
    assert images.shape == expected.shape and images.dtype is torch.uint8 and images.is_contiguous()
    found = {key: psnr(images[row], expected[row]) for row, key in enumerate(encoded.keys)}
    assert min(found.values()) >= least, found
    assert decoder.counters["decoder.samples"] == len(encoded.encoded_rows) > 0
    decoder.close()


@pytest.mark.parametrize("crop", [CenterCrop((110, 150)), CenterCrop(60, resize=50, channels_last=True)])
def test_padded_images_equal_the_kernels(crop: CenterCrop) -> None:
    """In one batch with images that DALI decodes."""
    files = {"a": pillow_jpeg(scene(161, 119)), "b": pillow_jpeg(scene(90, 200)), "c": png_of(20, 30)}
    encoded = encode(crop, files)
    decoder = _decoder()
    images = decoder.start(encoded)()
    expected = np.empty(encoded.shape, np.uint8)
    assert crop.fill(expected, list(files.values()), range(3)) == []
    assert len(encoded.encoded_rows) == (1 if crop.resize is None else 0)
    for image, other in zip(images, torch.from_numpy(expected), strict=True):
        assert psnr(image, other) >= 50
    decoder.close()


def test_outputs_are_those_of_the_dynamic_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other executor would overwrite them while a GPU copies them."""
    import nvidia.dali

    asked = []

    class Recorded(nvidia.dali.Pipeline):  # type: ignore[misc]
        def __init__(self, **options: object) -> None:
            asked.append(options.get("exec_dynamic"))
            super().__init__(**options)

    monkeypatch.setattr(nvidia.dali, "Pipeline", Recorded)
    decoder, [batch] = _decoder(), _batches(set(), 1)
    _check(decoder.start(batch)(), batch)
    decoder.close()
    assert asked == [True]


def png_of(width: int, height: int) -> bytes:
    from PIL import Image

    return png(Image.fromarray(scene(width, height)))


@pytest.mark.stress
def test_missing_flip_is_seen() -> None:
    """The test above would see a missing flip, and a box that is one pixel off."""
    encoded = encode(RandomResizedCrop(64, flip=1), {"a": GOOD})
    expected, _ = decode_by_kernel(encoded, "raise")
    decoder = _decoder()
    encoded.flips[:] = False
    assert psnr(decoder.start(encoded)()[0], expected[0]) < 30
    encoded.flips[:] = True
    encoded.boxes[:, [0, 2]] += 1 if encoded.boxes[0, 2] < 96 else -1
    assert psnr(decoder.start(encoded)()[0], expected[0]) < 45


@pytest.mark.parametrize(
    ("ahead", "depth", "bad"),
    [
        # Each place of a bad batch, and each depth, in `make test`; all pairs in `make stress`.
        pytest.param(*way, bad, marks=[pytest.mark.stress] * ((i + j) % 3 > 0))
        for i, way in enumerate([(1, 1), (2, 4), (3, 2), (8, 1), (8, 4)])
        for j, bad in enumerate([set(), {0}, {3}, {1, 2, 3}, {0, 7}, {6, 7}])
    ],
)
def test_a_bad_image_ends_the_pipeline_and_nothing_is_lost(ahead: int, depth: int, bad: set[int]) -> None:
    """Each batch equals the kernel's, or raises its own error, for any number of batches under way."""
    decoder, batches = _decoder(queue_depth=depth), _batches(bad)
    started, failed = [], set()
    for k in range(len(batches) + ahead):
        if k < len(batches):
            started.append((k, decoder.start(batches[k])))
        if k >= ahead - 1 and started:
            number, result = started.pop(0)
            try:
                _check(result(), batches[number])
            except DecodeError as error:
                failed.add(number)
                assert error.key == f"{number}b"
    assert not started and failed == bad
    assert decoder.counters["decoder.batches"] == len(batches)
    assert decoder.counters["decoder.fallbacks"] >= len(bad)
    assert bool(decoder.counters["decoder.rebuilt"]) == bool(bad)
    decoder.close()


def _check(images: torch.Tensor, encoded: EncodedImages) -> None:
    expected, _ = decode_by_kernel(encoded, "repeat")
    assert min(psnr(image, wanted) for image, wanted in zip(images, expected, strict=True)) > 33


@pytest.mark.parametrize(("threads", "depth"), [(1, 2), (3, 1), (3, 6)])
def test_any_number_of_threads(threads: int, depth: int) -> None:
    decoder, batches = _decoder(threads=threads, queue_depth=depth), _batches({4}, 9)
    results = [decoder.start(batch) for batch in batches]
    for k, result in enumerate(results):
        if k == 4:
            with pytest.raises(DecodeError):
                result()
        else:
            _check(result(), batches[k])
    decoder.close()


@pytest.mark.parametrize("on_error", ["repeat", "replace"])
def test_bad_images_are_replaced_and_named(on_error: str) -> None:
    decoder, batches = _decoder(on_error), _batches({1, 2})
    for batch in batches:
        _check(decoder.start(batch)(), batch)
    assert [key for key, _ in decoder.bad] == ["1b", "2b"]
    assert decoder.counters["bad.samples"] == 2
    decoder.close()


def test_refused_image_ends_one_pipeline_only() -> None:
    decoder = _decoder("repeat")
    for epoch in range(3):
        for encoded in _batches({1, 2}, 4):
            images, (expected, _) = decoder.start(encoded)(), decode_by_kernel(encoded, "repeat")
            assert min(psnr(image, other) for image, other in zip(images, expected, strict=True)) > 38
        assert sorted(key for key, _ in decoder.bad) == sorted(["1b", "2b"] * (epoch + 1))
    assert decoder.counters["decoder.rebuilt"] == 2
    raising = _decoder()
    raising._refused.add("1b")
    with pytest.raises(DecodeError, match="decode '1b'"):
        raising.start(_batches({1}, 2)[1])()
    assert raising.counters["decoder.rebuilt"] == 0


def test_end_of_a_pipelines_work_does_not_end_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder()
    first, second = _batches(set(), 2)
    decoder.start(first)()

    def nothing_scheduled(*stream: object) -> None:
        raise StopIteration

    monkeypatch.setattr(decoder._pipe, "share_outputs", nothing_scheduled)
    assert decoder.start(second)().shape == second.shape
    assert decoder.counters["decoder.fallbacks"] == 1


@pytest.mark.parametrize("where", ["_feed", "_collect"])
def test_an_interrupt_does_not_give_a_batch_the_images_of_another(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Those that were started before it too."""
    decoder, batches = _decoder(), _batches(set(), 7)
    results = [decoder.start(batch) for batch in batches[:2]]

    def interrupted(batch: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.start(batches[2])
    results += [decoder.start(batch) for batch in batches[3:]]
    for result, batch in zip(results, batches[:2] + batches[3:], strict=True):
        _check(result(), batch)
    decoder.close()


def test_a_pipeline_that_was_not_built_leaves_no_other_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder()
    small, large = (encode(RandomResizedCrop(size, flip=0.5), {"a": GOOD}) for size in (24, 40))
    _check(decoder.start(small)(), small)

    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(decoder, "_new_pipeline", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.start(large)
    assert decoder.start(large)().shape == (1, 3, 40, 40)
    decoder.close()


def test_memory_is_for_most_images_and_not_for_the_largest() -> None:
    large = {"large": pillow_jpeg(scene(5000, 40))}
    decoder = _decoder()
    encoded = encode(CenterCrop(24), large | {str(k): GOOD for k in range(39)})
    decoder.start(encoded)()
    assert decoder._hints == (96, 72)
    decoder = _decoder()
    decoder.start(encode(CenterCrop(24), large))()
    assert decoder._hints == (4096, 40)


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.gpu.dali.usable_cores", lambda: 96)
    monkeypatch.setattr("fastload.gpu.dali.local_ranks", lambda: 8)
    assert (_threads(8), _threads(1024)) == (8, 12)
    monkeypatch.setattr("fastload.gpu.dali.local_ranks", lambda: 200)
    assert _threads(8) == 1


def test_decoder_that_rests_keeps_no_pipeline_but_one_that_works() -> None:
    decoder = _decoder()
    first, second = _batches(set(), 2)
    result = decoder.start(first)
    decoder.rest()
    assert decoder._pipe is not None, "a batch is in it"
    result()
    decoder.rest()
    assert decoder._pipe is None
    assert decoder.start(second)().shape == second.shape


def test_results_are_kept_until_they_are_waited_for() -> None:
    """In any order, and some never, as after an epoch was left early."""
    decoder, batches = _decoder(), _batches(set(), 7)
    results = [decoder.start(batch) for batch in batches]
    for number in (4, 0, 5, 2):
        _check(results[number](), batches[number])
    _check(decoder.start(batches[0])(), batches[0])
    decoder.close()


def test_other_sizes_and_larger_batches() -> None:
    """For progressive resolution, and for a smaller last batch."""
    decoder = _decoder()
    for size, n in ((24, 2), (24, 1), (24, 5), (40, 2), ((24, 40), 2), (24, 3)):
        encoded = encode(RandomResizedCrop(size, flip=0.5), {str(k): GOOD for k in range(n)})
        pending = decoder.start(encoded), decoder.start(encoded)
        for result in pending:
            _check(result(), encoded)
    encoded = encode(RandomResizedCrop(24, channels_last=True, flip=0.5), {"a": GOOD})
    assert decoder.start(encoded)().shape == (1, 24, 24, 3)
    nothing = encode(RandomResizedCrop(24, flip=0.5), {"png": png_of(30, 30)})
    assert decoder.start(nothing)().shape == (1, 3, 24, 24)
    decoder.close()


def test_the_slot_is_kept_while_dali_reads_it_and_no_longer() -> None:
    decoder = _decoder()
    encoded = _batches(set(), 1)[0]
    kept = weakref.ref(encoded.data)
    result = decoder.start(encoded)
    del encoded
    gc.collect()
    assert kept() is not None
    images = result()
    assert images.shape[0] == 3
    del result
    gc.collect()
    assert kept() is None
    decoder.close()
    gc.collect()
    assert int(images.sum()) > 0  # the pixels outlive the pipeline


def test_decoder_that_always_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in the trainer's process, at a tenth of the speed, is no replacement for it."""

    def fail(*_: object) -> None:
        raise RuntimeError("Critical error in pipeline:\nencountered:\n\nout of memory\nCurrent pipeline is")

    decoder, batches = _decoder(), _batches(set(), 8)
    monkeypatch.setattr(decoder, "_collect", fail)
    with pytest.raises(FastloadError, match=r"in a row on sound images.*out of memory"):
        for batch in batches:
            _check(decoder.start(batch)(), batch)
    decoder.close()


def test_damage_that_only_the_kernel_refuses() -> None:
    """Known, and in the README: bad codes in the middle of a JPEG are an error of the kernel only."""
    middle = GOOD.index(b"\xff\xda") + 40
    damaged = GOOD[:middle] + b"\xff\xc4" + GOOD[middle + 2 :]
    encoded = encode(RandomResizedCrop(24, scale=(1, 1), flip=0.5), {"a": damaged})
    with pytest.raises(DecodeError):
        decode_by_kernel(encoded, "raise")
    decoder = _decoder()
    assert decoder.start(encoded)().shape == (1, 3, 24, 24)
    decoder.close()


@pytest.mark.parametrize(
    "options",
    [
        {"hw_decoder_load": 1.5},
        {"hw_decoder_load": -0.1},
        {"queue_depth": 0},
        {"queue_depth": None},
        {"threads": 0},
        {"width_hint": "large"},
    ],
)
def test_options(options: dict[str, object]) -> None:
    [name] = options
    with pytest.raises(ArgumentError, match=name):
        Dali(**options)  # type: ignore[arg-type]


def test_no_leaks(no_leaks: None) -> None:
    decoder, batches = _decoder(), _batches({2}, 4)
    for k, batch in enumerate(batches):
        result = decoder.start(batch)
        if k == 2:
            with pytest.raises(DecodeError):
                result()
    decoder.close()


def test_batches_are_the_kernels_type() -> None:
    batch = EncodedBatch(
        RandomResizedCrop(8, flip=0.5), 1, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)
    )
    assert batch.fill([0], [np.frombuffer(GOOD, np.uint8)], [0], ["a"]) == []
    decoder = _decoder()
    assert decoder.start(batch.finish())().shape == (1, 3, 8, 8)
    decoder.close()
