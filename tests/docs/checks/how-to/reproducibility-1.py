import random

noisy = ImageFolder("s3://bucket/train", lambda image: (torch.rand(2), random.random()))


def drawn(workers, seed):
    torch.manual_seed(7)
    return [numbers[0].tolist() for numbers, _ in DataLoader(noisy, 8, num_workers=workers, seed=seed)]


assert drawn(0, 1) == drawn(2, 1) and drawn(1, None) != drawn(2, None)


def order(kind):
    torch.manual_seed(7)
    return [labels.tolist() for images, labels in kind(dataset, batch_size=8, shuffle=True, num_workers=2)]


assert order(DataLoader) == order(torch.utils.data.DataLoader)
