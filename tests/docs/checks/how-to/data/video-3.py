check(clips)
assert len(rows) > 75 and sum(row["stop"] - row["start"] for row in rows) > 500_000
numbers = sorted(number_of(dataset[index][0]) // 12 for index in range(len(dataset)))
assert len(set(numbers)) == len(numbers) // 2
dataset.close()
