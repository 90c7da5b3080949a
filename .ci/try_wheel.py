"""Try an installed wheel of fastload: its kernel must decode, in the loader and under other Pythons.

python try_wheel.py [OTHER_PYTHON ...]
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

SIDE = 256  # of the photo: grey, as bright as the number of its row


def try_kernel(kernel: str, photo: str) -> None:
    """Under any Python, without numpy: halve the photo."""
    name = "fastload.images.compiled"
    loader = importlib.machinery.ExtensionFileLoader(name, kernel)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    compiled = importlib.util.module_from_spec(spec)
    loader.exec_module(compiled)
    half = SIDE // 2
    memory = bytearray(half * half * 3)
    out = memoryview(memory).cast("B", (1, half, half, 3))
    item = (0, Path(photo).read_bytes(), 0.0, 0.0, float(SIDE), float(SIDE), False)
    assert compiled.crop_resize(out, [item], True, True, SIDE * SIDE, True) == []
    assert all(abs(out[0, y, half // 2, 0] - (2 * y + 0.5)) < 3 for y in range(half))
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}: the kernel decodes ({compiled.SIMD}, libjpeg-turbo {compiled.LIBJPEG_TURBO})")


def try_wheel(others: list[str]) -> None:
    import PIL.Image

    import fastload
    import fastload.images

    assert fastload.images.backend()["jpeg"] == "kernel", "the fallback was chosen"
    import fastload.images.compiled as compiled

    kernel = compiled.__file__
    assert "site-packages" in kernel and kernel.endswith(".abi3.so"), kernel
    folder = Path("photos")
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(8):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.linear_gradient("L").convert("RGB").save(path, quality=95)
    dataset = fastload.ImageFolder(folder, fastload.RandomResizedCrop(64), cache="cache")
    loader = fastload.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    for _ in range(2):
        assert [tuple(images.shape) for images, _ in loader] == [(4, 3, 64, 64)] * 2
    try_kernel(kernel, str(path))
    for other in others:
        subprocess.run([other, __file__, "--kernel", kernel, path], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kernel"]:
        try_kernel(*sys.argv[2:])
    else:
        try_wheel(sys.argv[1:])
