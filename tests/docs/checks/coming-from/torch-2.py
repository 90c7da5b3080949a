import torch

from bench.peers.scripts.torchvision_on_cpu import torchvision  # imports beside a CPU build of torch too

device, steps = "cpu", []
mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
train_step = lambda images, labels: steps.append((images, labels.tolist()))
torch.manual_seed(0)
