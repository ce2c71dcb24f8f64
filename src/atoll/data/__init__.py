"""Data preparation: from images to the shards and density of each cluster, and the reader that training uses."""
