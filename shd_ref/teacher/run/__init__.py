"""A teacher over a data set, in this order.

``graph.py`` opens the file and chooses which sites teach which layers. ``inputs.py`` reads the data once, for keys
and lengths, and makes batches of similar length. ``reading.py`` matches plans on some samples, where they are asked
for. ``teacher.py`` holds these with sessions, and runs batches; ``averaged.py`` runs further teachers beside them.
``outputs.py`` is what a batch gave each student.
"""
