"""One self-contained HTML page about a cache: what is in it, and how well it was squeezed."""
