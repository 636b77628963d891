"""Programs that attack, load and fuzz a service; ``make attack``, ``make soak`` and ``make nightly`` run them."""
