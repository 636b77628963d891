"""The served models by name: loading, warming, swapping."""
