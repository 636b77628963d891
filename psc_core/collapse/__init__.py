"""Neural collapse after every layer, and the rule that selects the candidate layers."""
