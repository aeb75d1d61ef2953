"""The CUDA device of the store: page-locked host memory, streams, events, and copies between the
tiers. Nothing outside this package names CUDA, and it is imported for ``device="cuda"`` only, so
that importing kvmem loads no driver and a process that never asks for a GPU may still fork."""
