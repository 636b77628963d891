"""The tasks as the service answers for them: a module for each task, by its name."""
