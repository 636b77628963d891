"""The heads (the paper's g′): a module serves, and beside it stands what fits it."""
