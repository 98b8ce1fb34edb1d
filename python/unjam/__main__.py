"""``python -m unjam``: the same as the command ``unjam``."""

import sys

from .cli import main

sys.exit(main())
