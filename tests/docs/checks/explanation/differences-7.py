shards = TarDataset("s3://bucket/shards/train-{00000..00003}.tar", transform=CenterCrop(64))
with pytest.raises(TypeError):
    len(shards)
with pytest.raises(TypeError):
    shards[0]
