for index in range(6):
    sample = scene[index]
    assert (sample["pixels"] == 10 * sample["row"] + sample["column"]).all()
scene.close()
