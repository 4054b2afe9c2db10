"""Models, cases and ranks for the tests of the PyTorch binding; importing these needs torch."""
