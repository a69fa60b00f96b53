"""``attn bench``: the kernels against what a user would run instead. See ``docs/performance.md``."""
