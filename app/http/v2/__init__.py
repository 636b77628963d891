"""The Open Inference Protocol v2 over REST, with the binary tensor extension."""
