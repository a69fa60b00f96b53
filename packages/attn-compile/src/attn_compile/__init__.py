"""torch.compile support for attn-core."""
