from torch import nn

model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
