"""Proves with CUDA processes that memory limits hold on this node: what to try, trying it, what it shows."""
