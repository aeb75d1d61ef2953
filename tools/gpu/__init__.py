"""The parts of `tools/bench_gpu.py`: what runs on a machine with an NVIDIA GPU.

`machine.py` says what is there and what is missing, `correctness.py` runs the tests, `clock.py`
times, `record.py` keeps figures, `report.py` draws them; the others are sections of the benchmark.
Sections know a `Bench` only, so that tests run them on the CPU with a clock and a device of their
own.
"""
