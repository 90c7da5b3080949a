assert audio.shape[1] == 8000 and set(speakers.tolist()) == {3}
assert len(dataset) == 9
for index in (0, 5):
    first = index * 10 * RATE
    assert np.abs(dataset[index][0] - lecture[first : first + WINDOW]).max() < 1e-4
dataset.close()
