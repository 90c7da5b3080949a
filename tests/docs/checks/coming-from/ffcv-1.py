import torch

mean, std, device = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], "cpu"
seen = []
train_step = lambda images, labels: seen.append(images)
