"""One self-contained HTML page about a cache: what ``shd ls`` says, and what lies in its records.

``page.py`` is the way in; ``content.py`` reads the cache, and runs its teacher on a few samples; ``facts.py`` is the
table of ``shd ls``. Imports the cache and ``teacher``; the page and its figures need jinja2 and matplotlib.
"""
