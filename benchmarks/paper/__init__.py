"""The paper's tables and figures: one script each, next to the paper's own numbers."""
