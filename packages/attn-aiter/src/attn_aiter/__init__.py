"""AMD AITER as a backend of attn-core.

Importing this package imports neither ``aiter`` nor a GPU library; see ``attn_aiter.probe`` for how an
installation is examined and ``attn_aiter.load`` for the one place that imports it.
"""

__version__ = "0.1.0"
