import av
import numpy as np

import fastload

generator = np.random.default_rng(0)
bucket = fastload.open_store("s3://bucket")


def put(name, frames, width=96, height=64):
    """A film of faint noise, with the frame's number as black and white squares along its upper edge."""
    noise = generator.integers(96, 160, (16, height, width, 3), dtype=np.uint8)
    film = "film" + name[-4:]
    with av.open(film, "w", options={"movflags": "faststart"} if "films" in name else {}) as container:
        stream = container.add_stream("mpeg4", rate=24 if film.endswith("mkv") else 25)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", 12
        stream.bit_rate = 2_000_000
        for number in range(frames):
            image = noise[number % 16]
            image[:8] = np.repeat([255 * (number >> bit & 1) for bit in range(12)], 8)[None, :, None]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    bucket.write(name, open(film, "rb").read())


def number_of(image):
    """The number of a frame, a tensor (3, height, width)."""
    upper = image.float().mean(0)[:8]
    return sum(int(upper[2:6, 8 * bit + 2 : 8 * bit + 6].mean() > 128) << bit for bit in range(12))


def check(clips):
    for clip in clips:
        numbers = [number_of(image) for image in clip]
        assert numbers == list(range(numbers[0], numbers[0] + len(clip))), numbers


for number in range(8):
    put(f"short/{number}.{'mkv' if number % 2 else 'mp4'}", 40)
for name in ("a", "b"):
    put(f"films/{name}.mp4", 1000)
