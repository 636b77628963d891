"""Maps that show how anomalous an image is at each position of an early layer, and where it is most anomalous."""
