"""The samples and the network of train.py: images of a bucket, and a ResNet (He et al. 2015).

`images`, `resnet` and `options` are the three functions that another task replaces; see your_own.py.
`resnet50` and `resnet18` are torchvision's "v1.5" networks (the stride is in the 3x3 convolution); `small` is
a network for images of 32 to 96 pixels on a CPU. Options: `variant="d"` is ResNet-D (He et al. 2018, arXiv
1812.01187: three 3x3 convolutions as the stem, average pooling in the shortcuts); `blur` puts a fixed
low-pass filter before every subsampling (BlurPool, Zhang 2019, arXiv 1904.11486), so that features learnt at
one resolution are valid at another.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

from fastload import ByEpoch, Cache, CenterCrop, ImageFolder, Normalize, RandomResizedCrop
from optim import by_epoch
from step import AMP, Task, top1, top5

__all__ = [
    *("IMAGENET", "MODELS", "ResNet", "check_classes", "images", "load_pretrained", "options", "resnet"),
]

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of each channel


# --- the functions that define the task


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `images` and `resnet`."""
    group = parser.add_argument_group("images")
    group.add_argument("--cache-mode", default="auto", choices=["auto", "raw", "dct", "shrunk", "decoded"])
    group.add_argument(
        "--resolution", type=_sizes, default="224", help="pixels, or EPOCH:PIXELS,...: 0:128,6:224"
    )
    group.add_argument("--eval-size", type=int, help="pixels; default: the largest of --resolution")
    group.add_argument(
        "--min-area", type=float, default=0.08, help="smallest area of a crop, as a share of the image"
    )
    group.add_argument("--label-smoothing", type=float, default=0.1)
    group.add_argument("--target-top5", type=float, help="0 to 1; the run ends when it is reached")
    group = parser.add_argument_group("model")
    group.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    group.add_argument("--variant", default="b", choices=["b", "d"], help="d: ResNet-D")
    group.add_argument("--blur", action="store_true", help="BlurPool before every subsampling")
    group.add_argument("--bn-momentum", type=float, default=0.1)


def _sizes(text: str) -> dict[int, int]:
    sizes = by_epoch(text)
    if 0 not in sizes:
        raise argparse.ArgumentTypeError(f"resolutions must begin with epoch 0, found {text!r}")
    return sizes


def images(args: argparse.Namespace, mode: str) -> ImageFolder:
    """The samples of mode "train" or "eval"."""
    cache = Cache(args.cache, args.cache_mode) if args.cache else None
    if mode == "eval":
        size = args.eval_size or max(args.resolution.values())
        crop = CenterCrop(size, resize=round(size * 256 / 224), channels_last=args.channels_last)
        return ImageFolder(f"{args.url}/val", crop, cache=cache)
    settings = {"scale": (args.min_area, 1), "flip": 0.5, "channels_last": args.channels_last}
    crops = {epoch: RandomResizedCrop(size, **settings) for epoch, size in args.resolution.items()}
    return ImageFolder(f"{args.url}/train", ByEpoch(crops), cache=cache)


def resnet(args: argparse.Namespace, dataset: ImageFolder) -> Task:
    """The network for the samples, and its loss."""
    variant = {"variant": args.variant, "blur": args.blur}
    floats = Normalize(*IMAGENET, dtype=AMP[args.amp] or torch.float32, channels_last=args.channels_last)
    return Task(
        MODELS[args.model](classes=len(dataset.classes), bn_momentum=args.bn_momentum, **variant),
        loss=partial(nn.functional.cross_entropy, label_smoothing=args.label_smoothing),
        metrics={"accuracy": top1, "top-5": top5},
        batch_transform=lambda batch: (floats(batch[0]), batch[1]),
        record={"model": args.model, "classes": list(dataset.classes), **variant},
    )


def check_classes(trained: Any, evaluated: Any) -> None:
    """Raise SystemExit where two datasets have other classes: a label is the number of a class."""
    ours, theirs = (getattr(dataset, "classes", None) for dataset in (trained, evaluated))
    if ours != theirs:
        only = [sorted(set(one or ()) - set(other or ())) for one, other in ((ours, theirs), (theirs, ours))]
        raise SystemExit(
            f"the classes of training and evaluation differ: only in the first are {only[0]}, only in the "
            f"second {only[1]}. Make their folders alike: equal labels would be different classes"
        )


def load_pretrained(module: nn.Module, saved: dict[str, Any], path: Any) -> str:
    """Load the weights of a checkpoint of train.py or of torchvision; returns what was loaded, and what not.

    The last layer stays new where it has another shape: other classes.

    Args:
        saved: the contents of the file at `path`.

    Raises:
        SystemExit: another layer does not fit.
    """
    own = module.state_dict()
    state = dict(saved.get("model", saved))
    if saved.get("ema"):
        averages = saved["ema"]["average"]
        names = [name for name, _ in module.named_parameters()]
        if len(names) != len(averages):
            raise SystemExit(
                f"{path} is of another network: it has {len(averages)} averaged weights, and this one "
                f"{len(names)}: give the --model, --variant and --blur of its run"
            )
        state |= zip(names, averages, strict=True)
    if isinstance(module, ResNet) and "fc.weight" in state and len(state) == len(own):
        state = dict(zip(own, state.values(), strict=True))  # torchvision's layers have the same order
    fitting = {name: value for name, value in state.items() if name in own and value.shape == own[name].shape}
    head = list(own)[-1].rpartition(".")[0]
    heads = {name for name in own if head and name.startswith(f"{head}.")}  # none if it is the whole network
    wrong = {name for name in own.keys() | state.keys() if name not in fitting and name not in heads}
    if wrong or not fitting:
        raise SystemExit(
            f"{path} is of another network: {len(wrong or heads)} of {len(own)} weights do not fit, such as "
            f"{min(wrong or heads)}: give the --model, --variant and --blur of its run"
        )
    module.load_state_dict(fitting, strict=False)
    new = [f"{name} {tuple(value.shape)}" for name, value in own.items() if name not in fitting]
    return f"loaded {len(fitting)} of {len(own)} weights of {path}; new: {', '.join(new) or 'none'}"


# --- the network


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
