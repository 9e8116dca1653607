"""Where this process stands: ranks, hosts, mesh, GPUs."""
