seen = []
train_step = lambda images, labels: seen.extend(labels.tolist())
