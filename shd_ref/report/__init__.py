"""One self-contained HTML page about a cache; ``page.py`` is the way in. Needs jinja2.

It lists the cache in the words of ``facts.py``, which ``shd ls`` prints too, reads a few records for their merge
weights and maps, draws these as pictures inside the page, and fills ``page.html`` with all of it; with the teacher it
also measures what merging loses.
"""
