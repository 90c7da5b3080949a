assert [len(labels) for labels in seen] == [24]
loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, seed=1)
batches = iter(loader)
next(batches)
torch.save(loader.state_dict(), "loader.pt")
again = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1, seed=1)
again.load_state_dict(torch.load("loader.pt"))
assert [labels.tolist() for images, labels in again] == [labels.tolist() for images, labels in batches]
