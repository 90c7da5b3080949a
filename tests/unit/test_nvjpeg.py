"""Decoding by nvJPEG: the path around it, on the CPU, and what it has to wait for, with late engines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import DataLoader, ObjectDataset
from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.gpu.decoding import Decoding
from fastload.gpu.nvjpeg import Engine, NvJpegDecoder, TorchvisionEngine, why_no_nvjpeg
from fastload.images import CenterCrop, RandomResizedCrop
from fastload.images.encoded import EncodedImages, decode_by_kernel
from fastload.metrics.counters import Counters
from tests.encodedimages import CpuEngine, encode, psnr, undecodable
from tests.photos import pillow_jpeg, scene, variants

CPU = torch.device("cpu")
GOOD = pillow_jpeg(scene(96, 72))


def _decoder(on_error: str = "raise", engine: Engine | None = None) -> NvJpegDecoder:
    return NvJpegDecoder(CPU, on_error, Counters(), [], engine or CpuEngine())


@pytest.mark.parametrize("seed", [0, 100])
@pytest.mark.parametrize(
    ("crop", "least"),
    [
        (RandomResizedCrop(64, flip=0.5), 50),
        (CenterCrop(96, resize=110), 50),
        (CenterCrop((48, 96), resize=140), 50),
        (CenterCrop(96), 50),
        (CenterCrop((150, 90)), 50),  # higher than the images: padded
        (CenterCrop(64, resize=50, channels_last=True), 50),
        (
            RandomResizedCrop((20, 30), channels_last=True, flip=0.5),
            35,
        ),  # where the kernel decodes at a smaller scale
    ],
)
def test_the_same_images_as_the_kernel(crop: RandomResizedCrop | CenterCrop, least: float, seed: int) -> None:
    encoded = encode(crop, variants(), seed)
    images = _decoder().start(encoded)()
    expected, _ = decode_by_kernel(encoded, "raise")
    assert images.shape == expected.shape and images.dtype is torch.uint8 and images.is_contiguous()
    found = {key: psnr(images[row], expected[row]) for row, key in enumerate(encoded.keys)}
    assert min(found.values()) >= least, found


class _LateEngine(CpuEngine):
    """Like the hardware engine: it ignores earlier work, and is not done when `decode` returns.

    Attributes:
        queued: memory that earlier work of the stream has not read yet; to be read when it is waited for.
    """

    def __init__(self) -> None:
        self.queued: list[tuple[torch.Tensor, list[int]]] = []
        self.read: list[list[int]] = []
        self._writes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def queue_read(self, memory: torch.Tensor) -> None:
        self.queued.append((memory, memory.tolist()))

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for memory, _ in self.queued:
            memory.zero_()  # freed memory is handed out at once, and the engine writes there at once
        images = super().decode(files)
        late = [torch.zeros_like(image) for image in images]
        self._writes += zip(late, images, strict=True)
        return late

    def wait(self) -> None:
        for memory, _ in self.queued:
            self.read.append(memory.tolist())
        self.queued.clear()
        for late, image in self._writes:
            late.copy_(image)
        self._writes.clear()


class _NeverWaitsBefore(_LateEngine):
    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits % 2 == 0:
            super().wait()


class _NeverWaitsAfter(_LateEngine):
    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits % 2 == 1:
            super().wait()


def _run(engine: _LateEngine) -> tuple[bool, bool]:
    """(whether earlier work read the right memory, whether the images are right)."""
    encoded = encode(RandomResizedCrop(32, flip=0.5), {"a": GOOD, "b": GOOD})
    decoder = _decoder(engine=engine)
    expected = _decoder().start(encoded)()
    engine.queue_read(torch.tensor([1, 2, 3]))
    images = decoder.start(encoded)()
    return engine.read == [[1, 2, 3]], torch.equal(images, expected)


def test_engines_that_ignore_stream_order() -> None:
    """The decoder waits for the stream before the engine writes, and for the engine before anything reads."""
    assert _run(_LateEngine()) == (True, True)


@pytest.mark.stress
def test_engines_with_guards_removed_read_and_write_too_early() -> None:
    """Each of the two waits, removed, is seen by the test above."""
    assert _run(_NeverWaitsBefore())[0] is False
    assert _run(_NeverWaitsAfter())[1] is False


class _Broken(_LateEngine):
    """Fails when part of a batch is under way."""

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        super().decode(files)
        raise RuntimeError("nvjpegDecodeBatched failed: 8")


def test_engines_are_waited_for_when_they_fail() -> None:
    """The file's memory is a slot, which goes back to its worker."""
    engine = _Broken()
    encoded = encode(RandomResizedCrop(32, flip=0.5), {"a": GOOD})
    decoder = _decoder(engine=engine)
    expected, _ = decode_by_kernel(encoded, "raise")
    assert torch.equal(decoder.start(encoded)(), expected)
    assert not engine._writes
    assert decoder.counters["decoder.fallbacks"] == 1


def test_an_engine_that_makes_another_size() -> None:
    """Some apply the EXIF orientation: the kernel decodes such a batch."""

    class Turning(CpuEngine):
        def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [image.transpose(1, 2) for image in super().decode(files)]

    encoded = encode(RandomResizedCrop(32, flip=0.5), {"a": GOOD})
    expected, _ = decode_by_kernel(encoded, "raise")
    assert torch.equal(_decoder(engine=Turning()).start(encoded)(), expected)


def _batch(k: int) -> EncodedImages:
    return encode(
        RandomResizedCrop(24, flip=0.5), {"a": GOOD, f"bad{k}": undecodable(GOOD), "c": GOOD}, seed=k
    )


def test_bad_images() -> None:
    decoder = _decoder()
    failing = decoder.start(_batch(1))
    good = encode(RandomResizedCrop(24, flip=0.5), {"a": GOOD})
    assert decoder.start(good)().shape == (1, 3, 24, 24)
    with pytest.raises(DecodeError, match="bad1"):
        failing()
    decoder = _decoder("skip")
    images = decoder.start(_batch(2))()
    assert any(torch.equal(images[1], images[row]) for row in (0, 2))
    assert [key for key, _ in decoder.bad] == ["bad2"]
    assert decoder.counters["bad.samples"] == 1


# --- where there is no nvJPEG


@pytest.fixture
def photo(tmp_path: Path) -> str:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(GOOD)
    return str(tmp_path / "photos")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nvjpeg_without_a_cuda_device_is_refused_at_the_loader(photo: str, device: str | None) -> None:
    dataset = ObjectDataset(photo, transform=CenterCrop(32))
    with pytest.raises(ArgumentError, match=r"decode='nvjpeg'.*batches go to cpu: give device='cuda'"):
        DataLoader(dataset, 1, device=device, decode="nvjpeg")
    with pytest.raises(ArgumentError, match="CUDA" if torch.cuda.is_available() else "needs CUDA"):
        DataLoader(dataset, 1, device="cuda" if not torch.cuda.is_available() else "cpu", decode="nvjpeg")


def test_auto_without_a_cuda_device_does_not_try_nvjpeg(photo: str) -> None:
    loader = DataLoader(ObjectDataset(photo, transform=CenterCrop(32)), 1, decode="auto")
    for _ in range(8):
        list(loader)
    decode = loader.stats()["decode"]
    assert "nvjpeg" not in decode["rates"] and "CUDA device" in decode["missing"]["nvjpeg"]


def test_torchvision_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "pip install torchvision" in str(why_no_nvjpeg(torch.device("cuda")))


def test_torchvision_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For example when its operators belong to another build of torch."""
    (tmp_path / "torchvision").mkdir()
    words = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({words!r})")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    why = str(why_no_nvjpeg(torch.device("cuda")))
    assert words in why and f"belongs to torch {torch.__version__}" in why


def test_a_decoder_on_the_cpu_cannot_start() -> None:
    """Without the loader's own check, as in the benchmarks."""
    decoding = Decoding("nvjpeg", CPU, workers=0, on_error="raise", counters=Counters(), bad=[])
    with pytest.raises(FastloadError, match=r"decode='nvjpeg' cannot start: nvJPEG decodes on a CUDA device"):
        decoding.start(encode(CenterCrop(32), {"a": GOOD}))


def test_torchvision_without_nvjpeg_is_found_when_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny first image finds it, instead of a fallback for every batch."""

    def refuse(*arguments: object, **options: object) -> list[torch.Tensor]:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    class Stream:
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torchvision.io, "decode_jpeg", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(RuntimeError, match="not compiled with nvJPEG"):
        TorchvisionEngine(torch.device("cuda"))


def test_an_engine_that_cannot_start_is_an_error_of_the_first_batch(
    photo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without nvJPEG in torchvision nothing is decoded: the kernel does not decode under its name."""

    def refuse(device: torch.device) -> Engine:
        raise RuntimeError("torchvision not compiled with nvJPEG support")

    monkeypatch.setattr("fastload.gpu.decoding.why_no_nvjpeg", lambda device: None)
    monkeypatch.setattr("fastload.gpu.nvjpeg.TorchvisionEngine", refuse)
    loader = DataLoader(ObjectDataset(photo, transform=CenterCrop(32)), 1, decode="nvjpeg")
    with pytest.raises(FastloadError, match=r"decode='nvjpeg' cannot start: .*not compiled with nvJPEG"):
        list(loader)
