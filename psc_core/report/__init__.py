"""A fit or an evaluation as a page, a model card and a few lines for the terminal."""
