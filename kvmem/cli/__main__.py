"""``python -m kvmem.cli`` is the ``kvmem`` command."""

from kvmem.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
