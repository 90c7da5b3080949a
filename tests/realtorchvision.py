"""torchvision beside a CPU build of torch: its wheels hold operators for CUDA builds only.

Its Python parts need none of them, so the two that it looks for at import are declared, and never called.
"""

import torch

try:
    import torchvision
except RuntimeError:
    _DECLARED = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _DECLARED.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
