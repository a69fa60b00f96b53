"""``python -m attn_core.cli`` is ``attn``."""

from . import main

if __name__ == "__main__":
    main()
