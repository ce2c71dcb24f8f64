"""Data preparation: from images to the shards of each island, and the reader that training uses."""
