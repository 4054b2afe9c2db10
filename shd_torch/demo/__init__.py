"""The demo: the whole path on handwritten digits, with a table and pictures.

Start with ``run.py``; ``vit.py`` is the teacher and the students, which ``train.py`` and ``students.py`` train. May
import everything; imported by ``commands`` alone.
"""
