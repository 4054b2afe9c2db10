"""The ``shd`` command: each subcommand is a plain function; ``derive.py`` makes its options, ``terminal.py`` prints.

Heavy packages are imported when a command runs. ``shd_torch.commands`` uses ``derive`` and ``terminal`` too.
"""
