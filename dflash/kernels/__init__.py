"""Triton kernels for what torch would do in many passes over memory. Each has a plain form beside it in torch, which
the CPU and float64 run and which tests compare with. Import a module only where its tensors are on a GPU."""
