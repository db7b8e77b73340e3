"""A parallel text, encoded once into shards on disk, and read at random from there."""
