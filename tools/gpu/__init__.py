"""The parts of `tools/bench_gpu.py`: what runs on a machine with an NVIDIA GPU.

`machine.py` says what is there and what is missing, `correctness.py` runs the tests, `clock.py`
times, `record.py` keeps figures, `report.py` draws them; the others are sections of the benchmark:
of kernels, and on top of `managers.py` those of a Manager (`swaps.py`, `overlap.py`, `serving.py`).
Sections know a `Bench` only, so that tests run them on the CPU with a clock and a device of their
own.
"""
