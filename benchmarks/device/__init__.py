"""The device step: its time against the plain network's, by stations, against the floor and against ensembles."""
