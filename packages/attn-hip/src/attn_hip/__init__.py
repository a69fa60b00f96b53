"""The fa2 attention kernels: one source for gfx942, gfx950, NVIDIA sm_90 and the host CPU."""
