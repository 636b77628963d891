"""The paper's tables and figures, one script each, beside the paper's own numbers."""
