"""Run paths, one module per AITER function. Each states what it passes, plans on the host, and runs."""
