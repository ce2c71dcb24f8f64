"""A model as a diffusers folder, with its pipeline and its model card."""
