"""Many samples an object: read as streams until the shards are indexed, at random from then on."""
