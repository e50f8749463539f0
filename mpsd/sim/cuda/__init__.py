"""Simulated CUDA processes."""
