"""Decoding by nvJPEG: the path around it, on the CPU, and what it has to wait for, with late engines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fastload import DataLoader, ObjectDataset
from fastload.cli.doctor import check_decoders
from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.gpu.decoding import Decoding
from fastload.gpu.nvjpeg import Engine, NvJpegDecoder, new_engine, why_no_nvjpeg
from fastload.images import CenterCrop, RandomResizedCrop
from fastload.images.encoded import EncodedImages, decode_by_kernel
from fastload.images.torchcodec import why_no_torchcodec
from fastload.metrics.counters import Counters
from tests.encodedimages import CpuEngine, encode, psnr, undecodable
from tests.photos import oriented, pillow_jpeg, scene, variants

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
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


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither torchcodec nor torchvision, until a test puts one into sys.modules."""
    for name in [*sys.modules, "torchvision", "torchcodec"]:
        if name.partition(".")[0] in ("torchvision", "torchcodec"):
            monkeypatch.setitem(sys.modules, name, None)
    why_no_torchcodec.cache_clear()
    yield
    why_no_torchcodec.cache_clear()


@pytest.fixture
def cuda_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines ask of torch.cuda."""

    class Stream:
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def _put(monkeypatch: pytest.MonkeyPatch, name: str, module: str, **content: Any) -> None:
    """A stand-in for a library."""
    for path, attributes in ((name, {"__version__": "0.16.0"}), (f"{name}.{module}", content)):
        stand_in = ModuleType(path)
        vars(stand_in).update(attributes)
        monkeypatch.setitem(sys.modules, path, stand_in)
    setattr(sys.modules[name], module, sys.modules[f"{name}.{module}"])


def _torchcodecs_decode_jpeg(files: Any, *, mode: str, device: Any) -> list[torch.Tensor]:
    """As TorchCodec's: a list of tensors, RGB, turned by the EXIF orientation."""
    assert mode == "RGB" and device == CUDA
    images = []
    for file in files:
        image = ImageOps.exif_transpose(Image.open(BytesIO(file.numpy().tobytes())))
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return images


def _torchvisions_decode_jpeg(files: Any, *, mode: str, device: Any) -> list[torch.Tensor]:
    assert isinstance(files, list) and mode == "rgb" and device == CUDA
    return CpuEngine().decode(files)


def _refuse(*arguments: object, **options: object) -> Any:
    raise RuntimeError("not compiled with nvJPEG support")


RGB = SimpleNamespace(RGB="rgb")


def test_libraries_that_are_missing_are_asked_for(without_libraries: None) -> None:
    why = str(why_no_nvjpeg(CUDA))
    assert "TorchCodec or torchvision" in why and "pip install torchcodec" in why


def test_libraries_that_do_not_load_are_named(
    without_libraries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example when their operators belong to another build of torch."""
    for name, words in (("torchvision", "operator nms does not exist"), ("torchcodec", "no libnvrtc.so.13")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError({words!r})")
        for module in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    why = str(why_no_nvjpeg(CUDA))
    assert f"no libnvrtc.so.13. Install the build for torch {torch.__version__}" in why
    assert "torchvision: operator nms does not exist" in why


def test_torchcodec_that_is_too_old_is_named_and_torchvision_serves(
    without_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(monkeypatch, "torchcodec", "decoders")
    assert "0.16.0 decodes no images: pip install 'torchcodec>=0.16'" in str(why_no_nvjpeg(CUDA))
    _put(monkeypatch, "torchvision", "io")
    assert why_no_nvjpeg(CUDA) is None


@pytest.mark.parametrize(
    ("torchcodec", "torchvision", "library"),
    [
        (_torchcodecs_decode_jpeg, _torchvisions_decode_jpeg, "torchcodec"),
        (_refuse, _torchvisions_decode_jpeg, "torchvision"),  # a build without CUDA
        (None, _torchvisions_decode_jpeg, "torchvision"),
        (_torchcodecs_decode_jpeg, None, "torchcodec"),
    ],
)
def test_torchcodec_comes_first_and_torchvision_in_its_place(
    without_libraries: None,
    cuda_by_the_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    torchcodec: Any,
    torchvision: Any,
    library: str,
) -> None:
    """Both give the same pixels, also of a photo with an orientation, which TorchCodec applies."""
    if torchcodec is not None:
        _put(monkeypatch, "torchcodec", "decoders", decode_jpeg=torchcodec)
    if torchvision is not None:
        _put(monkeypatch, "torchvision", "io", decode_jpeg=torchvision, ImageReadMode=RGB)
    assert why_no_nvjpeg(CUDA) is None
    engine = new_engine(CUDA)
    assert engine.library == library
    turned = {str(k): pillow_jpeg(scene(96, 72), exif=oriented(k)) for k in range(1, 9)}
    encoded = encode(RandomResizedCrop(64, flip=0.5), {"plain": GOOD, **turned})
    decoder = _decoder(engine=engine)
    images = decoder.start(encoded)()
    assert decoder.library == library and decoder.counters["decoder.fallbacks"] == 0
    expected, _ = decode_by_kernel(encoded, "raise")
    assert min(psnr(image, other) for image, other in zip(images, expected, strict=True)) > 45


def test_doctor_says_through_which_library_nvjpeg_decodes(
    without_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nvjpeg" not in check_decoders().found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _put(monkeypatch, "torchvision", "io")
    assert '"nvjpeg" through torchvision' in check_decoders().found
    assert "pip install torchcodec" in check_decoders().advice
    _put(monkeypatch, "torchcodec", "decoders", decode_jpeg=_refuse)
    why_no_torchcodec.cache_clear()
    assert '"nvjpeg" through torchcodec' in check_decoders().found
    assert check_decoders().advice == ""


def test_libraries_that_cannot_decode_on_the_device_are_both_named(
    without_libraries: None, cuda_by_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny first image finds it, instead of a fallback for every batch."""
    _put(monkeypatch, "torchcodec", "decoders", decode_jpeg=_refuse)
    _put(monkeypatch, "torchvision", "io", decode_jpeg=_refuse, ImageReadMode=RGB)
    with pytest.raises(RuntimeError, match=r"torchcodec: not compiled.*; torchvision: not compiled"):
        new_engine(CUDA)


def test_a_decoder_on_the_cpu_cannot_start() -> None:
    """Without the loader's own check, as in the benchmarks."""
    decoding = Decoding("nvjpeg", CPU, workers=0, on_error="raise", counters=Counters(), bad=[])
    with pytest.raises(FastloadError, match=r"decode='nvjpeg' cannot start: nvJPEG decodes on a CUDA device"):
        decoding.start(encode(CenterCrop(32), {"a": GOOD}))


def test_an_engine_that_cannot_start_is_an_error_of_the_first_batch(
    photo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without nvJPEG nothing is decoded: the kernel does not decode under its name."""

    def refuse(device: torch.device) -> Engine:
        raise RuntimeError("torchvision: not compiled with nvJPEG support")

    monkeypatch.setattr("fastload.gpu.decoding.why_no_nvjpeg", lambda device: None)
    monkeypatch.setattr("fastload.gpu.nvjpeg.new_engine", refuse)
    loader = DataLoader(ObjectDataset(photo, transform=CenterCrop(32)), 1, decode="nvjpeg")
    with pytest.raises(FastloadError, match=r"decode='nvjpeg' cannot start: .*not compiled with nvJPEG"):
        list(loader)
