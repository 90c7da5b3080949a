# pip install numpy==2.3.5 pillow-simd==12.1.1.post0 tensorflow-cpu==2.21.0 keras==3.15.1 protobuf==7.36.2

"""tf.data over local files, as TensorFlow's own ResNet reads them; mode "memory": over photos in memory.

It decodes only the crop's part of a photo, by the fast DCT, and scales it without antialiasing.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from peer_side import files, in_memory, serve


def start(job):
    paths, labels = zip(*(in_memory(job) if job.mode == "memory" else files(job)), strict=True)
    dataset = tf.data.Dataset.from_tensor_slices((list(paths), list(labels))).shuffle(len(paths))
    read = tf.identity if job.mode == "memory" else tf.io.read_file
    dataset = dataset.map(lambda name, label: (sample(read(name), job.size), label), tf.data.AUTOTUNE)
    dataset = dataset.batch(job.batch).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.threading.private_threadpool_size = job.workers
    dataset = dataset.with_options(options)
    return lambda: (len(images.numpy()) for images, _ in dataset)


def sample(data, size):
    corner, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.zeros((1, 0, 4)),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([corner[:2], extent[:2]], 0), channels=3)
    image = tf.image.random_flip_left_right(tf.image.resize(image, (size, size)))
    return tf.transpose(tf.cast(image, tf.uint8), (2, 0, 1))


if __name__ == "__main__":
    serve(start, "tensorflow-cpu")
