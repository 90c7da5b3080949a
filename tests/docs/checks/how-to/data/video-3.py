check(clips)
assert len(rows) > 150 and sum(row["stop"] - row["start"] for row in rows) > 1_000_000
numbers = sorted(number_of(dataset[index][0]) // 12 for index in range(len(dataset)))
assert len(set(numbers)) == len(numbers) // 2
dataset.close()
