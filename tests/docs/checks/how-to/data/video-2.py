assert clips.shape == (4, 8, 3, 64, 96) and clips.dtype == torch.uint8
check(clips)
check(read_clip(io.BytesIO(dataset._payload(index)), share) for index in (0, 1) for share in (0.0, 0.999999))
dataset.close()
