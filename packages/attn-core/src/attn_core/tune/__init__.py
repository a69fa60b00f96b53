"""Measure two candidates side by side on this machine, and say where one overtakes the other.

Knows no backend by name. ``attn tune`` is its command line.
"""
