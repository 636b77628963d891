"""Neural collapse after every layer, and the rule that picks the candidate layer."""
