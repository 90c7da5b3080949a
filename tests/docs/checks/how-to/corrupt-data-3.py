done = subprocess.run(warm.split(), capture_output=True, text=True)
document = json.loads(done.stdout.splitlines()[-1])
assert done.returncode == 1 and document["failed"] == 1, done
assert document["failures"][0]["key"] == "cat/0002.jpg"
