"""From a trained network to a fitted model, stage by stage."""
