"""The whole contract, for the instruction set that this machine would choose (or ``ATTN_CPU_ISA``)."""

from attn_core.testing.suite import *  # noqa: F403

attn_backends = ("fa2",)
