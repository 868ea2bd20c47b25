"""Attacks on real processes: `python -m tests.hostile siege` or `soak`, each with `--help`."""

import sys
from importlib import import_module

COMMANDS = ("siege", "soak")

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        sys.exit(import_module(f"tests.hostile.{sys.argv[1]}").main(sys.argv[2:]))
    sys.exit(f"usage: python -m tests.hostile {{{','.join(COMMANDS)}}} [--help]")
