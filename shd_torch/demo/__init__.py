"""The demo: the whole path on handwritten digits, with a table and pictures.

Start with ``run.py``; ``models.py`` has the digits and the teacher, ``students.py`` what is compared. May import
everything; imported by ``commands`` alone.
"""
