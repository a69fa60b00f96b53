"""AMD AITER as a backend of attn-core."""
