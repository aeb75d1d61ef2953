"""The ``kvmem`` command. It stands on the public API alone."""
