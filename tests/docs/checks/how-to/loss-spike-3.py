import json

loader = make_loader()
loader.exclude(["night/0037.jpg", 7])
batches = iter(loader)
next(batches)
loader.skip(range(3, 5))
state = json.loads(json.dumps(loader.state_dict()))
assert "exclusions" in state and len(list(batches)) == 5
resumed = make_loader()
resumed.load_state_dict(state)
assert len(list(resumed)) == 5
