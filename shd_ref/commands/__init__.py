"""The ``shd`` command: each subcommand is a plain function; ``app.py`` puts them in the order of use.

``derive.py`` makes options of their annotations and of the option dataclasses, ``terminal.py`` prints. Heavy packages
are imported when a command runs. May import everything else; imported by ``shd_ref.cli`` and, for ``derive`` and
``terminal``, by ``shd_torch.commands``.
"""
