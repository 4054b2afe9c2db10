"""The ``shd`` command, one file a subcommand; ``app.py`` holds the application and what subcommands share.

Imports everything else; nothing imports it but ``shd_ref.cli``.
"""
