"""From pictures to each island's shards: sources, features, clusters, latents and text, shards, the reader."""
