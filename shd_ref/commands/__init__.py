"""The ``shd`` command, above everything else in ``shd_ref``.

``app.py`` lists the commands in the order of use; each is a function in ``graphs.py``, ``plan.py``, ``precompute.py``
or ``caches.py``. ``program.py`` reads their options from annotations and dataclasses (``options.py`` has those that
several share), and says mistakes; ``terminal.py`` prints.
"""
