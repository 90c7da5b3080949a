import json

seen = []
train_step = lambda images, labels: seen.append(labels.tolist())
