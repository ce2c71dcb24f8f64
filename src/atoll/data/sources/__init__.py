"""The kinds of sources: folders, WebDataset tars, parquet files, Hugging Face datasets, emoji."""
