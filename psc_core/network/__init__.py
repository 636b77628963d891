"""Load a trained network, list its layers, and cut it after some of them."""
