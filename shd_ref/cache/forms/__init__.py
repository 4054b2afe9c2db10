"""The targets that a record can hold of a sample, each a class by which the manifest describes one.

``form.py`` says what a cache asks of a form. ``attention.py`` has what maps and queries with keys share, ``rows.py``
all that is rows (logits, hidden states, embeddings), ``exact.py`` last states with the teacher's head. ``held.py``
lists them and joins those of one cache: a form from elsewhere is one class more in ``FORMS`` there.
"""
