"""The kinds of source: folders, WebDataset tars, parquet files, Hugging Face datasets, emoji."""
