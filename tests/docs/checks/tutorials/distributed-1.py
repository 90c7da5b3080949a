import torch

state = torch.load("run.pt", weights_only=True)
assert state["epoch"] == 0 and state["used"].sum() == 32 and state["used"].max() == 1, state
