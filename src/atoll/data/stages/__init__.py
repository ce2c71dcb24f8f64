"""The stages of `atoll prepare`, each of which makes one artifact."""
