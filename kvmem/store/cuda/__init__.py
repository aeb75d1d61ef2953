"""A CUDA device: torch's streams and events, CUDA's runtime for copies and page-locked memory.

`api.py` is what is asked of both; `device.py` the device; `arena.py` and `pinning.py` its memory;
`copies.py` and `cost_model.py` the ways of a transfer; `uploads.py` and `step_tensors.py` the
arrays of a step; `compute.py` tensors to kernels; `guards.py` what debug adds. Nothing here is
imported before a Manager is made for a CUDA device.
"""
