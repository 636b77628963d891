"""Float64 linear algebra on feature matrices that need not fit in memory."""
