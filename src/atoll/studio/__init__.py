"""The studio: a run behind an HTTP API and a web page; requests of all users share one loop over denoising steps."""
