"""`fastload convert`: reads an image folder or shards, and writes shards."""
