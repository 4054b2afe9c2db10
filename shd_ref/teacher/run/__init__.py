"""A teacher over a data set, in the order of ``teacher.py``.

It opens the file, and finds which sites teach which layers. ``inputs.py`` reads the data once, for keys and lengths,
and makes batches of similar length. Plans are matched on some samples, where they are requested. Then batches run in
sessions of the graph with the squeeze in it (``graph.py``), and further teachers next to it (``averaged.py``).
``outputs.py`` has the outputs of a batch.
"""
