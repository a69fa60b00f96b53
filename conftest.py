"""For every test of the workspace."""

import os

os.environ["ATTN_TUNED"] = ""  # what the developer measured on this machine is no concern of the tests
