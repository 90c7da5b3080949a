"""The file formats of shards: TFRecord, tf.train.Example, tar, and the index files beside them."""
