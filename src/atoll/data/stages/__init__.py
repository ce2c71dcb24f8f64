"""The stages of `atoll prepare`. Each makes one artifact; the stage of the shards makes one per cluster."""
