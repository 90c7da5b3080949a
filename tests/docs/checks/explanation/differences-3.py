class Wrapper(torch.utils.data.Dataset):
    photos = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.photos[index]


wrapper = Wrapper()
wrapper.photos = train
with pytest.warns(UserWarning, match="for one sample at a time"):
    DataLoader(wrapper, 4)


class Own(ImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + 100


[(images, labels)] = DataLoader(Own("s3://bucket/val", CenterCrop(64)), 8, num_workers=1)
assert labels.min() == 100


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.rand(()).item()


stacked = torch.utils.data.StackDataset(Drawn(), Drawn())
batches = []
for Loader in (torch.utils.data.DataLoader, DataLoader):
    torch.manual_seed(0)
    batches += Loader(stacked, 2)
(first, second), ours = batches
assert ours[0].tolist() == [first[0], second[0]]
