"""Batched inference: decode, queue, device step."""
