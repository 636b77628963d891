"""Project the features of the candidate layer(s) to the feature vector z."""
