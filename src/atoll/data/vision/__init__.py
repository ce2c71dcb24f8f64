"""Vision networks for features, metrics and perceptual distances."""
