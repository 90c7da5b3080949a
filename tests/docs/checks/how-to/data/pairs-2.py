for name in ("images", "masks"):
    pathlib.Path("/data/loose", name).mkdir(parents=True)
for number in range(8):
    numbers = np.zeros((80, 100), np.uint8)
    numbers[20:50, 30:70] = 20
    Image.fromarray(numbers).convert("RGB").save(f"/data/loose/images/{number}.jpg")
    Image.fromarray(numbers).save(f"/data/loose/masks/{number}.png")
lines = ["image,mask", *(f"images/{number}.jpg,masks/{number}.png" for number in range(8))]
pathlib.Path("/data/loose/pairs.csv").write_text("\n".join(lines))
