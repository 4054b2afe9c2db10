"""The ``shd`` command, above everything else in ``shd_ref``."""
