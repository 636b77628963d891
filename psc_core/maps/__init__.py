"""Maps that show how strange an image is at each position of an early layer, and where it is strangest."""
