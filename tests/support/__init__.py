"""What tests of several rooms share: makers of caches, graphs and models, and programs that tests start."""
