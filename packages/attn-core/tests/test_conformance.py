from attn_core.testing.suite import *  # noqa: F403

attn_backends = ("reference",)
