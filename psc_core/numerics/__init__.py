"""Float64 algebra on feature matrices that need not fit in memory."""
