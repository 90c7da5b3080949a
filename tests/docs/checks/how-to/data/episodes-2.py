assert batch["actions"].shape == (len(now), 16, 7) and before.shape == now.shape == (len(now), 3, 64, 64)
for state, actions, t in zip(batch["state"], batch["actions"], batch["t"].tolist()):
    assert state[0, 0] == t and actions[:, 0].tolist() == list(range(t, t + 16))
assert len(rows) == 2 * 25 and dataset.key(3) == "one/states.bin @ 84"
dataset.close()
