"""Networks that say themselves which classes they tell apart, how images are prepared and where the weights are."""
