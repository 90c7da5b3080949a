"""ResNets (He et al. 2015), with the variants that train better at low resolution.

`resnet50` and `resnet18` are torchvision's "v1.5" networks (the stride is in the 3x3 convolution); `small` is
a network for images of 32 to 96 pixels on a CPU. Options: `variant="d"` is ResNet-D (He et al. 2018, arXiv
1812.01187: three 3x3 convolutions as the stem, average pooling in the shortcuts); `blur` puts a fixed
low-pass filter before every subsampling (BlurPool, Zhang 2019, arXiv 1904.11486), so that features learnt at
one resolution are valid at another.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

__all__ = ["IMAGENET", "MODELS", "ResNet", "resnet18", "resnet50", "small"]

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of each channel


class ResNet(nn.Module):
    """(N, 3, H, W) floats -> (N, classes) logits.

    Args:
        blocks: residual blocks in each stage; each stage after the first halves the resolution and doubles
            the channels.
        classes: of the last layer.
        bottleneck: blocks of 1x1, 3x3, 1x1 convolutions with four times the channels at their end; else
            blocks of two 3x3.
        width: channels of the first stage.
        variant: "b" (v1.5) or "d".
        blur: BlurPool.
        small_images: a stem for images below about 100 pixels: a 3x3 convolution instead of the 7x7.
        bn_momentum: the weight of a new batch in the running statistics of batch normalisation.
    """

    def __init__(
        self,
        blocks: list[int],
        classes: int,
        *,
        bottleneck: bool,
        width: int = 64,
        variant: str = "b",
        blur: bool = False,
        small_images: bool = False,
        bn_momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.stem = _stem(width, variant, blur, small_images)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                block = _Block(channels, width << stage, stride, bottleneck, variant, blur)
                stages.append(block)
                channels = block.out_channels
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, classes)
        _initialise(self, bn_momentum)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stages(self.stem(images))
        return self.classifier(features.mean((2, 3)))


class _Block(nn.Module):
    """A residual block: convolutions beside a shortcut."""

    def __init__(
        self, channels: int, width: int, stride: int, bottleneck: bool, variant: str, blur: bool
    ) -> None:
        super().__init__()
        self.out_channels = width * 4 if bottleneck else width
        subsampled = _strided(stride, blur)
        if bottleneck:
            self.branch = nn.Sequential(
                *_convolution(channels, width, 1),
                nn.ReLU(inplace=True),
                *subsampled(width, width),
                nn.ReLU(inplace=True),
                *_convolution(width, self.out_channels, 1),
            )
        else:
            self.branch = nn.Sequential(
                *subsampled(channels, width), nn.ReLU(inplace=True), *_convolution(width, width, 3)
            )
        self.shortcut = _shortcut(channels, self.out_channels, stride, variant, blur)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.relu(self.branch(images) + self.shortcut(images))


class BlurPool(nn.Module):
    """Every second pixel of each channel, after a binomial filter [1 2 1] x [1 2 1] / 16."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([0.25, 0.5, 0.25])
        kernel = row[:, None] * row[None, :]
        # A constant, so it is not part of a checkpoint.
        self.register_buffer("kernel", kernel.expand(channels, 1, 3, 3).contiguous(), persistent=False)
        self.pad = nn.ReflectionPad2d(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel.to(images.dtype)
        return nn.functional.conv2d(self.pad(images), kernel, stride=2, groups=images.shape[1])


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out),
    ]


def _strided(stride: int, blur: bool):
    """A function (channels, out) -> layers: a 3x3 convolution that subsamples by `stride`."""

    def layers(channels: int, out: int) -> list[nn.Module]:
        if stride == 1 or not blur:
            return _convolution(channels, out, 3, stride)
        convolution, norm = _convolution(channels, out, 3)
        return [convolution, norm, nn.ReLU(inplace=True), BlurPool(out)]

    return layers


def _shortcut(channels: int, out: int, stride: int, variant: str, blur: bool) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    if stride == 1:
        return nn.Sequential(*_convolution(channels, out, 1))
    if blur:
        return nn.Sequential(BlurPool(channels), *_convolution(channels, out, 1))
    if variant == "d":  # a strided 1x1 convolution would read only a quarter of the pixels
        return nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), *_convolution(channels, out, 1))
    return nn.Sequential(*_convolution(channels, out, 1, stride))


def _stem(width: int, variant: str, blur: bool, small_images: bool) -> nn.Sequential:
    if small_images:
        return nn.Sequential(*_convolution(3, width, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    if variant == "d":
        layers = [*_convolution(3, width // 2, 3, 2), nn.ReLU(inplace=True)]
        layers += [*_convolution(width // 2, width // 2, 3), nn.ReLU(inplace=True)]
        layers += [*_convolution(width // 2, width, 3)]
    else:
        layers = _convolution(3, width, 7, 2)
    pool: list[nn.Module] = [nn.MaxPool2d(3, stride=2, padding=1)]
    if blur:
        pool = [nn.MaxPool2d(3, stride=1, padding=1), BlurPool(width)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), *pool)


def _initialise(network: ResNet, bn_momentum: float) -> None:
    """He's initialisation; the last norm of each branch starts at 0, so that each block is the identity.

    With large batches, the first epochs converge because of the latter (Goyal et al. 2017, arXiv 1706.02677).
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            module.momentum = bn_momentum
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, _Block):
            norms = [layer for layer in module.branch if isinstance(layer, nn.BatchNorm2d)]
            nn.init.zeros_(norms[-1].weight)


resnet50 = partial(ResNet, [3, 4, 6, 3], bottleneck=True)
resnet18 = partial(ResNet, [2, 2, 2, 2], bottleneck=False)
small = partial(ResNet, [1, 1, 1], bottleneck=False, width=16, small_images=True)

MODELS = {"resnet50": resnet50, "resnet18": resnet18, "small": small}
