"""A double of torch.cuda, CUDA's runtime and the kernels, for a machine without a GPU.

`streams.py` runs queued work in an order drawn from a seed and proves orders by vector clocks;
`memory.py` knows which addresses are whose; `runtime.py` and `torch_cuda.py` are the two modules;
`kernels.py` runs the CPU twins where the GPU would run kernels; `opening.py` puts it in place.
"""
