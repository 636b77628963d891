"""The device step: compared with the plain network, a lower bound, ensembles and MC dropout, and by part."""
