assert [row["z"] for row in rows] == [0, 4, 8, 12, 16]
for index in range(5):
    patch = volumes[index]["patch"]
    assert patch.shape == (8, 16, 16) and patch[:, 0, 0].tolist() == list(range(4 * index, 4 * index + 8))
volumes.close()
