import torch

state = torch.load("run.pt", weights_only=True)
assert state["epoch"] == 3 and state["loader"]["sampler"]["state"]["epoch"] == 3
