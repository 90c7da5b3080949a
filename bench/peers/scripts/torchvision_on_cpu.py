"""torchvision beside a CPU build of torch.

Its wheels hold operators for CUDA builds only, and without two of them it cannot be imported. Its parts in
Python, on Pillow, need none; so the two are declared, and never called.
"""

import torch

try:
    import torchvision
except RuntimeError:
    DECLARED = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        DECLARED.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
