assert sorted(before) == [0] * 16 + [1] * 16, before
train_step = lambda images, labels: after.extend(labels.tolist())
