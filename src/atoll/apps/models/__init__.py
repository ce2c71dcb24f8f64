"""Models in and out: checkpoints of others (`convert`), and export as a diffusers folder with pipeline and card."""
