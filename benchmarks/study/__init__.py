"""The study: what SHD adds to each base loss, against its rivals, over seeds. ``python -m benchmarks.study --help``.

``grids`` says what is run, a file a task; ``tasks`` holds data, teacher and student of each; ``runs.py`` runs what is
missing, ``analysis.py`` makes the tables, ``pictures.py`` the pictures. Answers are in docs/study.md, setup and
pictures in docs/study/setup.md.
"""
