"""Features of the candidate layer to the feature vector z."""
