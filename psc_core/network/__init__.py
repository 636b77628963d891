"""Loading a trained network, naming its layers, and cutting it after some of them."""
