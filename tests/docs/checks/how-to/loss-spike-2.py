from pathlib import Path

assert Path("step.html").read_text().count("<img ") == 8
again = torch.load("step.pt", weights_only=True)["batches"][0]
assert torch.equal(again[0], images) and torch.equal(again[1], labels)
