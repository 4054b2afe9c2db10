"""One self-contained HTML page about a cache: what is in it, and how well it was squeezed.

``page.py`` is the way in; ``content.py`` reads the cache, ``evidence.py`` runs the teacher on a few samples, and
``sections.py`` and ``figures.py`` make the parts. Imports the cache and ``teacher``; needs jinja2 and matplotlib.
"""
