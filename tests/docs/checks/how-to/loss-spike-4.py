assert max(range(8), key=losses.__getitem__) == 1 and losses[1] > 3 * sorted(losses)[-2], losses
assert worst.key == "night/0037.jpg", worst
