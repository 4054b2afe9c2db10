"""One self-contained HTML page about a cache; ``page.py`` is the way in. Needs jinja2."""
