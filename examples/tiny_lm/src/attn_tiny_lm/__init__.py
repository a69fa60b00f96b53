"""A byte-level language model of Python source text that generates through `attn_core`.

The package is an example and a real end-to-end check: `attn demo` loads the weights shipped here and writes
text with plain decode and with speculative verify, both through a paged KV cache.
"""

from attn_tiny_lm.model import ModelConfig, TinyLM, load_model, save_model

__all__ = ["ModelConfig", "TinyLM", "load_model", "save_model"]
