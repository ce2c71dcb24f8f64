"""The studio: an HTTP API and a web page for a run. All requests share one loop over denoising steps."""
