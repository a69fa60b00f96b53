"""The smallest third-party attention backend: float32 decode over NHD pages, on the CPU."""
