"""Kernels for CUDA devices: from Python to PTX, to machine code, to a launch.

`array.py` is what the public functions take instead of NumPy arrays; `kernel.py` describes a kernel
and a launch as data; `prims.py` is the one module with inline PTX; `compile.py` makes and caches
machine code; `launch.py` loads and launches it. Only the last three import a CUDA library, at the
first launch.
"""
