"""Export of a model as a diffusers folder, with its pipeline and model card."""
