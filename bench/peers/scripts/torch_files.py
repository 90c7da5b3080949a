# pip install torch==2.13.0 numpy==2.3.5 pillow-simd==12.1.1.post0
# pip install --no-deps torchvision==0.28.0

"""torch's DataLoader with torchvision's ImageFolder over local files, decoded by pillow-simd."""

from peer_side import epochs, serve, torch_loader
from torchvision_on_cpu import torchvision

transforms = torchvision.transforms


def start(job):
    crop = transforms.Compose(
        [
            transforms.RandomResizedCrop(job.size),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
    dataset = torchvision.datasets.ImageFolder(job.folder, crop)
    return epochs(job, lambda: torch_loader(dataset, job))


if __name__ == "__main__":
    serve(start, "torch", "torchvision", "pillow-simd")
